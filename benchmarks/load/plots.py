"""Charts of a load report; points that are not valid are hollow and not on the solid lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.load.points import Point, ttft
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.sweep import is_past_saturation
from vllm_autoprune.pages.charts import Chart, Mark, Rule, Series

XValue = Callable[[Point], float]

CURVE_LEVELS = (50, 90, 95, 99)
"""Percentiles that are marked on a distribution."""
CURVE_POINTS = 200
"""Points at most of one curve of a distribution."""


def draw_charts(points: Sequence[Point], slo: Slo) -> list[Chart]:
    """All charts for which there are points."""
    charts = [throughput_latency(points, slo)]
    if any(point.load.rate is not None for point in points):
        charts += [rate_latency(points, slo), goodput_rate(points)]
    load = choose_common_load(points)
    if load is not None:
        charts.append(ttft_distribution([point for point in points if point.load == load], load))
    return charts


def throughput_latency(points: Sequence[Point], slo: Slo) -> Chart:
    """Median TTFT over completed requests a second: solid in a closed loop, dashed in an open."""
    series = [
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        _line(chosen, lambda p: p.completed, 50, colour, f"{arm}, {kind} loop", kind == "open")
        for colour, (arm, mine) in enumerate(_arms(points))
        for kind, chosen in _kinds(mine)
    ]
    return Chart(
        "Latency over throughput",
        "achieved, requests/s",
        "median TTFT, ms",
        series,
        _objective(slo),
        y_scale="log",
        x_zero=True,
    )


def rate_latency(points: Sequence[Point], slo: Slo) -> Chart:
    """Median and p99 TTFT over the offered rate: the sweep."""
    series = [
        _line(mine, _offered, level, colour, f"{arm}, p{level}", level == 99)
        for colour, (arm, mine) in enumerate(_arms(_open_loop(points)))
        for level in (50, 99)
    ]
    return Chart(
        "Latency over rate",
        "offered, requests/s",
        "TTFT from the scheduled time, ms",
        series,
        _objective(slo),
        y_scale="log",
        x_zero=True,
    )


def goodput_rate(points: Sequence[Point]) -> Chart:
    """Requests a second that met the objective, over the offered rate."""
    open_loop = _open_loop(points)
    most = max(_offered(point) for point in open_loop)
    series = [
        Series(
            arm,
            [
                Mark(
                    _offered(point),
                    point.good,
                    _tip(point, f"{point.good:.2f} of {_offered(point):.2f} requests/s good"),
                    hollow=not point.valid,
                    link=point.runs[0].records_link,
                )
                for point in mine
            ],
            colour=colour,
        )
        for colour, (arm, mine) in enumerate(_arms(open_loop))
    ]
    everything = Series("all requests", path=[(0.0, 0.0), (most, most)], dashed=True, colour=5)
    return Chart(
        "Goodput over rate",
        "offered, requests/s",
        "within the objective, requests/s",
        [*series, everything],
        x_zero=True,
        y_zero=True,
    )


def ttft_distribution(points: Sequence[Point], load: Load) -> Chart:
    """The share of requests whose first token came within a time, at one load."""
    series = []
    for colour, (arm, mine) in enumerate(_arms(points)):
        for point in mine:
            values = sorted(1000 * v for own in point.by_request(ttft).values() for v in own)
            if not values:
                continue
            name = arm if point.valid else f"{arm} (not valid)"
            places = {round(n * (len(values) - 1) / CURVE_POINTS) for n in range(CURVE_POINTS + 1)}
            path = [(values[n], 100 * (n + 1) / len(values)) for n in sorted(places)]
            ranks = [(level, values[-(-level * len(values) // 100) - 1]) for level in CURVE_LEVELS]
            marks = [
                Mark(value, level, f"{name}\np{level} {value:.0f} ms", hollow=not point.valid)
                for level, value in ranks
            ]
            series.append(Series(name, marks, path, "steps", dashed=not point.valid, colour=colour))
    return Chart(
        f"Distribution of TTFT, {load.describe()}",
        "TTFT, ms",
        "requests answered within it, %",
        series,
        x_scale="log",
        y_zero=True,
    )


def choose_common_load(points: Sequence[Point]) -> Load | None:
    """The highest load that every arm has, if possible valid and below saturation for all.

    Beyond saturation a queue grows as long as a run lasts, so that its latencies mean nothing.
    """
    arms = {point.arm for point in points}
    common = [
        load
        for load in dict.fromkeys(point.load for point in points)
        if {p.arm for p in points if p.load == load} == arms
    ]
    valid = [load for load in common if all(p.valid for p in points if p.load == load)]
    below = [
        load for load in valid if not any(is_past_saturation(p) for p in points if p.load == load)
    ]
    best = below or valid or common
    return max(best, key=lambda load: (load.rate or 0, load.users or 0)) if best else None


def _line(
    points: Sequence[Point], x_value: XValue, level: int, colour: int, name: str, dashed: bool
) -> Series:
    marks = []
    for point in points:
        times = point.distribution(ttft)
        if times is None:
            continue
        value, low, high = (
            1000 * figure
            for figure in (times.at(level).value, times.at(level).low, times.at(level).high)
        )
        text = f"TTFT p{level} {value:.0f} ms ({low:.0f}–{high:.0f})"
        text += f"\n{point.completed:.2f} requests/s achieved"
        link = point.runs[0].records_link
        marks.append(
            Mark(x_value(point), value, _tip(point, text), low, high, not point.valid, link)
        )
    return Series(name, marks, dashed=dashed, colour=colour)


def _tip(point: Point, text: str) -> str:
    lines = [f"{point.arm}, {point.load.describe()}", text, f"{point.requests} requests"]
    return "\n".join(lines if point.valid else [*lines, "not valid"])


def _offered(point: Point) -> float:
    return point.offered or point.load.rate or 0.0


def _open_loop(points: Sequence[Point]) -> list[Point]:
    return sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)


def _kinds(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    closed = sorted((p for p in points if p.load.users), key=lambda p: p.load.users or 0)
    return [(name, own) for name, own in (("closed", closed), ("open", _open_loop(points))) if own]


def _arms(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Points by arm; an arm has the same colour in every chart."""
    names = list(dict.fromkeys(point.arm for point in points))
    return [(name, [p for p in points if p.arm == name]) for name in names]


def _objective(slo: Slo) -> list[Rule]:
    return [] if slo.ttft is None else [Rule(1000 * slo.ttft, f"objective {1000 * slo.ttft:g} ms")]
