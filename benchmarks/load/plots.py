"""The plots of a load report, as SVG.

Points that are not valid are hollow, and lines through them pale.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.load.percentiles import Distribution
from benchmarks.load.points import Point, ttft
from benchmarks.load.schedule import Slo
from vllm_autoprune.statistics import Estimate

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""
MARKS = ("o", "s", "^", "D", "v", "P")
SIZE = (6.4, 4.2)

XValue = Callable[[Point], float]


def throughput_latency(points: Sequence[Point], slo: Slo) -> str:
    """Median TTFT over completed requests a second: solid in a closed loop, dashed in an open."""
    figure, axes = build_axes("completed, requests/s", "median TTFT, ms (bars: 95 % interval)")
    for number, (arm, mine) in enumerate(_arms(points)):
        for kind, chosen in _kinds(mine):
            # In order of load: beyond the knee throughput may fall, and the line turns back.
            style = "-" if kind == "closed" else "--"
            _line(axes, chosen, lambda p: p.completed, 50, number, style, f"{arm}, {kind} loop")
    _draw_objective(axes, slo)
    axes.set_yscale("log")
    return render_svg(figure, axes)


def rate_latency(points: Sequence[Point], slo: Slo) -> str:
    """Median and p99 TTFT over the offered rate: the sweep."""
    figure, axes = build_axes("offered, requests/s", "TTFT from the scheduled time, ms")
    for number, (arm, mine) in enumerate(_arms(_open_loop(points))):
        for level, style in ((50, "-"), (99, ":")):
            _line(axes, mine, _offered, level, number, style, f"{arm}, p{level}")
    _draw_objective(axes, slo)
    axes.set_yscale("log")
    return render_svg(figure, axes)


def goodput_rate(points: Sequence[Point]) -> str:
    """Requests a second that met the objective, over the offered rate."""
    figure, axes = build_axes("offered, requests/s", "good, requests/s")
    most = 0.0
    for number, (arm, mine) in enumerate(_arms(_open_loop(points))):
        colour, mark = COLOURS[number % 6], MARKS[number % 6]
        axes.plot([_offered(p) for p in mine], [p.good for p in mine], color=colour, label=arm)
        for point in mine:
            face = colour if point.valid else "white"
            axes.plot(_offered(point), point.good, mark, color=colour, markerfacecolor=face)
            most = max(most, _offered(point))
    axes.plot([0, most], [0, most], color="#999", linewidth=0.8, label="all requests")
    return render_svg(figure, axes)


def ttft_distribution(points: Sequence[Point]) -> str:
    """The share of requests whose first token came within a time, at one load."""
    figure, axes = build_axes("TTFT, ms", "share of requests")
    for number, (arm, mine) in enumerate(_arms(points)):
        for point in mine:
            values = sorted(v for own in point.by_request(ttft).values() for v in own)
            shares = [(place + 1) / len(values) for place in range(len(values))]
            style = "-" if point.valid else ":"
            label = arm if point.valid else f"{arm} (not valid)"
            milliseconds = [1000 * value for value in values]
            axes.step(
                milliseconds,
                shares,
                where="post",
                color=COLOURS[number % 6],
                linestyle=style,
                label=label,
            )
    axes.set_xscale("log")
    return render_svg(figure, axes)


def _line(
    axes: Axes,
    points: Sequence[Point],
    x_value: XValue,
    level: int,
    number: int,
    style: str,
    name: str,
) -> None:
    colour, mark = COLOURS[number % 6], MARKS[number % 6]
    values = [(p, x_value(p), d.at(level)) for p in points if (d := _ttft(p)) is not None]
    if not values:
        return
    valid = [(x, e.value) for p, x, e in values if p.valid]
    every = [(x, e.value) for _, x, e in values]
    axes.plot([x for x, _ in every], [1000 * y for _, y in every], style, color=colour, alpha=0.25)
    axes.plot(
        [x for x, _ in valid], [1000 * y for _, y in valid], style, color=colour, label=name, lw=1.2
    )
    for point, x, estimate in values:
        face = colour if point.valid else "white"
        below, above = _bars(estimate)
        axes.errorbar(
            x,
            1000 * estimate.value,
            yerr=[[below], [above]],
            fmt=mark,
            color=colour,
            markerfacecolor=face,
            markersize=4,
            elinewidth=0.8,
            capsize=2,
        )


def _bars(estimate: Estimate) -> tuple[float, float]:
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return max(1000 * below, 0.0), max(1000 * above, 0.0)


def _ttft(point: Point) -> Distribution | None:
    return point.distribution(ttft)


def _offered(point: Point) -> float:
    return point.offered or point.load.rate or 0.0


def _open_loop(points: Sequence[Point]) -> list[Point]:
    return sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)


def _kinds(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    closed = sorted((p for p in points if p.load.users), key=lambda p: p.load.users or 0)
    return [(name, own) for name, own in (("closed", closed), ("open", _open_loop(points))) if own]


def _arms(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Points by arm; an arm has the same colour in every plot."""
    names = list(dict.fromkeys(point.arm for point in points))
    return [(name, [p for p in points if p.arm == name]) for name in names]


def _draw_objective(axes: Axes, slo: Slo) -> None:
    if slo.ttft is not None:
        axes.axhline(1000 * slo.ttft, color="#999", linewidth=0.8, label="TTFT objective")


def build_axes(across: str, up: str) -> tuple[Figure, Axes]:
    """An empty figure with labelled axes."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def render_svg(figure: Figure, axes: Axes) -> str:
    """The figure with its legend as an SVG element."""
    if axes.has_data():
        figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    out = io.StringIO()
    # A fixed salt and no date: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "load", "svg.fonttype": "none", "font.family": "sans"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
