"""Report of a paired experiment: one HTML file that loads nothing, ``points.csv``, and JSON.

Points that are not valid are hollow in the charts and not on the solid lines.
"""

from __future__ import annotations

import csv
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.common.report import format_estimate
from benchmarks.load.compare import (
    FIGURES,
    KNEE,
    Comparison,
    Point,
    Run,
    answer_question,
    build_sweep,
    compare_arms,
    group_runs,
    open_points,
)
from benchmarks.load.experiment import Paired, read_paired
from benchmarks.load.result import LATENCIES, LEVELS, RESULT, format_hits
from benchmarks.load.settings import CACHES, Slo
from vllm_autoprune.report import (
    Cell,
    CellTone,
    Chart,
    Document,
    Mark,
    Row,
    Rule,
    Section,
    Series,
    Table,
    render_document,
)
from vllm_autoprune.statistics import Estimate

REPORT, POINTS_CSV = "report.html", "points.csv"


def write_report(folder: Path) -> dict[str, object]:
    """Write ``report.html`` and ``points.csv`` of an experiment; return what ``--json`` prints.

    Besides that, ``invalid`` is the number of runs that are not valid.
    """
    paired = read_paired(folder)
    runs, slo = [entry.read(folder) for entry in paired.runs], paired.options.slo
    # Closed loops before open ones, each by load; arms of one load stay in their order.
    points = sorted(
        group_runs(runs),
        key=lambda p: (p.load.rate is not None, p.load.users or 0, p.load.rate or 0.0),
    )
    answer, compared = answer_question(points, slo, paired.broken), compare_arms(points)
    invalid = sum(not run.result.verdict.valid for run in runs)
    sections = [
        Section(
            "Charts",
            ["Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click it "
             "for its records."],
            _draw_charts(points, slo) if points else [],
        ),
        _build_ratios(compared),
        *_build_figures(points, slo),
        _build_runs(runs),
        _build_settings(paired, runs),
    ]  # fmt: skip
    document = Document(
        title=f"Load test: {', '.join(arm.name for arm in paired.arms)}",
        answer=answer.sentence,
        tone=answer.tone,
        warnings=answer.limits,
        facts=[
            f"{len(runs) - invalid} of {len(runs)} runs are valid",
            f"{sum(run.result.summary.requests for run in runs):,} requests counted",
            f"{paired.options.passes} passes",
            f"objective: {slo.describe()}",
            CACHES[paired.workload.cache],
        ],
        sections=[s for s in sections if s.charts or any(table.rows for table in s.tables)],
    )
    (folder / REPORT).write_text(render_document(document))
    described = [_describe_point(point) for point in points]
    with (folder / POINTS_CSV).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(described[0]) if described else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(described)
    return {
        "answer": answer.sentence,
        "tone": answer.tone,
        "limits": list(answer.limits),
        "report": str(folder / REPORT),
        "points": described,
        "comparisons": [each.model_dump(mode="json") for each in compared],
        "invalid": invalid,
    }


def _describe_point(point: Point) -> dict[str, object]:
    """One arm at one load, times in milliseconds, each estimate with its interval."""
    summary = point.summary
    row: dict[str, object] = {
        "load": point.load.label,
        "arm": point.arm,
        "valid": point.valid,
        "passes": len(point.runs),
        "requests": summary.requests,
        "offered_rate": _offered(point),
        "achieved_rate": summary.request_rate,
    }
    estimates: dict[str, tuple[Estimate | None, float]] = {"goodput": (summary.goodput, 1.0)}
    for name in LATENCIES:
        times = summary.latency(name)
        for level in LEVELS:
            estimates[f"{name.lower()}_p{level}_ms"] = (times.at(level) if times else None, 1000.0)
    for name, (estimate, unit) in estimates.items():
        figures = dataclasses.astuple(estimate) if estimate else (None, None, None)
        for end, figure in zip(("", "_low", "_high"), figures, strict=True):
            row[name + end] = None if figure is None else round(unit * figure, 4)
    return row


def _build_ratios(compared: Sequence[Comparison]) -> Section:
    """Every arm against the first, load by load."""
    against = compared[0].against if compared else ""
    rows: dict[tuple[str, str], list[Cell | str]] = {}
    passes: dict[tuple[str, str], list[Cell | str]] = {}
    for each in compared:
        key, ratio = (each.load.title, each.arm), each.ratio
        cell = Cell("not valid")
        if ratio is not None:
            tone: CellTone = "good" if ratio.high < 1 else "bad" if ratio.low > 1 else ""
            cell = Cell(f"{ratio.value:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", tone=tone)
        rows.setdefault(key, [*key]).append(cell)
        by_pass = ", ".join(f"{value:.3f}" for value in each.by_pass)
        passes.setdefault(key, [*key]).append(by_pass)
    head = ["load", "arm", *FIGURES]
    text = (
        f"Ratios to {against} on the same requests, with 95 % intervals: below 1 is less. An "
        "interval covers the choice of requests, but not differences between passes, so "
        "compare the passes too."
    )
    tables = [
        Table("", head, [*rows.values()], "ll"),
        Table("Ratios of each pass", head, [*passes.values()], "ll", folded=True),
    ]
    return Section(f"Against {against}", [text], tables=tables)


def _build_figures(points: Sequence[Point], slo: Slo) -> list[Section]:
    """Rates, latencies and the server's own figures."""
    sweeps = []
    for arm, swept in _by_arm(open_points(points)):
        sweep = build_sweep(swept, slo)
        note = "reached" if sweep.saturated else "not reached: try higher rates"
        sweeps.append([arm, sweep.knee, sweep.highest, note])
    rates = Section(
        "Knee and highest rate, requests/s",
        [f"Objective: {slo.describe()} for 99 % of requests. Knee: the highest rate that the "
         f"server keeps up with, median TTFT at most {KNEE:g} times that of the lowest valid rate. "
         "The highest rate within the objective is kept up with, too. Only measured rates, two of "
         "them where a run between them is not valid."],
        tables=[Table("", ["arm", "knee", "within the objective", "saturation"], sweeps, "l")],
    )  # fmt: skip

    def percentile(name: str, level: int) -> Callable[[Point], str]:
        def cell(point: Point) -> str:
            times = point.summary.latency(name)
            if times is None:
                return _format(None, 1000)
            enough = {q.level: q.enough for q in times.quantiles}[level]
            return _format(times.at(level), 1000) + ("" if enough else "†")

        return cell

    def of_server(point: Point) -> dict[str, str]:
        summary, metrics = point.summary, point.runs[0].result.metrics
        before, after = metrics.visual_tokens_before, metrics.visual_tokens_after
        tokens = "not counted" if before is None else f"{before:.0f} → {after or 0:.0f}"
        peak = metrics.peak_kv_use
        return {
            "images/s": f"{summary.image_rate:.2f}",
            "output tokens/s": f"{summary.output_token_rate:.1f}",
            "prompt tokens": f"{summary.prompt_tokens or 0:.1f}",
            "visual tokens": tokens,
            "peak KV use, %": "not reported" if peak is None else f"{100 * peak:.1f}",
            "image cache hits": format_hits(metrics.mm_cache_hits, metrics.mm_cache_queries),
            "prefix cache hits (tokens)": format_hits(
                metrics.prefix_cache_hits, metrics.prefix_cache_queries
            ),
        }

    views: tuple[tuple[str, str, Callable[[Point], Mapping[str, str]]], ...] = (
        (
            "Time to first token",
            "All passes together; in an open loop from the scheduled time, which a closed loop "
            "does not have. Goodput: the share of requests within the objective. †: too few "
            "requests for this percentile.",
            lambda p: {
                "requests": str(p.summary.requests),
                **{f"TTFT p{level}, ms": percentile("TTFT", level)(p) for level in LEVELS},
                "offered/s": "–" if (rate := _offered(p)) is None else f"{rate:.2f}",
                "achieved/s": f"{p.summary.request_rate:.2f}",
                "goodput, %": _format(p.summary.goodput, 100),
            },
        ),
        (
            "After the first token",
            "ITL: gaps between deltas, which may contain more than one token. TPOT: by the "
            "server's count of tokens. E2E: to the last text.",
            lambda p: {
                f"{name} p{level}, ms": percentile(name, level)(p)
                for name in ("ITL", "TPOT", "E2E")
                for level in (50, 99)
            },
        ),
        (
            "Figures of the server",
            "From its /metrics, first pass, and usage; visual tokens before and after pruning, as "
            "the plugin counts them. Token throughput is for information only: pruning lowers it.",
            of_server,
        ),
    )
    sections = [rates]
    for title, text, describe in views:
        columns = ["load", "arm", *(describe(points[0]) if points else ())]
        rows: list[Row] = [
            [
                point.load.title,
                point.arm if point.valid else Cell(point.arm, "not valid", tone="bad"),
                *describe(point).values(),
            ]
            for point in points
        ]
        folded = describe is of_server
        sections.append(
            Section(title, [text], tables=[Table("", columns, rows, "ll")], folded=folded)
        )
    return sections


def _build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict and notes, and links to its files."""
    rows: list[Row] = []
    for run in runs:
        verdict = run.result.verdict
        tone: CellTone = "" if verdict.valid else "bad"
        rows.append(
            [
                f"{run.number + 1}",
                run.arm,
                run.result.load.describe(),
                Cell(verdict.describe(), "; ".join(verdict.notes), tone=tone),
                Cell(f"{len(run.records)} requests", link=run.link()),
                Cell("run.json", link=run.link(RESULT)),
            ]
        )
    head = ["pass", "arm", "load", "verdict", "records", "figures"]
    return Section("Every run, in order of time", tables=[Table("", head, rows, "l" * len(head))])


def _build_settings(paired: Paired, runs: Sequence[Run]) -> Section:
    """Command, arms, workload, machine."""
    arms = []
    for arm in paired.arms:
        info = next((run.result.server for run in runs if run.arm == arm.name), {})
        served = arm.url or " ".join([arm.model, *arm.flags])
        facts = ", ".join(f"{key} {value}" for key, value in info.items())
        arms.append([arm.name, (arm.digest or "none")[:16], served, facts])
    settings: dict[str, object] = {}
    for name, value in paired.workload.model_dump().items():
        if isinstance(value, Mapping):  # each with its share
            shares = {key: 100 * weight / sum(value.values()) for key, weight in value.items()}
            value = ", ".join(f"{key} ({share:.0f} %)" for key, share in shares.items())
        settings[name.replace("_", "-")] = value
    settings |= runs[0].result.environment if runs else {}
    busy = [run.result.environment["load average"] for run in runs]
    settings["load average before each run"] = ", ".join(busy)
    head = ["arm", "digest of the state", "served as", "server information"]
    rows = [[key, str(value)] for key, value in settings.items()]
    return Section(
        "Settings",
        code=shlex.join(paired.command),
        tables=[Table("", head, arms, "llll"), Table("", ["setting", "value"], rows, "ll")],
        folded=True,
    )


def _format(estimate: Estimate | None, unit: float) -> str:
    """A figure and its interval, which the table puts under it."""
    if estimate is None:
        return "no answer"
    return format_estimate(estimate, unit, 0 if unit * estimate.value > 100 else 1)


def _draw_charts(points: Sequence[Point], slo: Slo) -> list[Chart]:
    """All charts for which there are points; an arm has the same colour in every chart."""
    curves, sweep, goodput = [], [], []
    for colour, (arm, mine) in enumerate(_by_arm(points)):
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        closed = sorted((p for p in mine if p.load.users), key=lambda p: p.load.users or 0)
        swept = open_points(mine)
        for kind, line in (("closed", closed), ("open", swept)):
            marks = [_mark_latency(p, p.summary.request_rate, 50) for p in line]
            series = _connect(f"{arm}, {kind} loop", marks, colour, dashed=kind == "open")
            curves += [series] if line else []
        for level in (50, 99):
            marks = [_mark_latency(p, _offered(p) or 0.0, level) for p in swept]
            sweep.append(_connect(f"{arm}, p{level}", marks, colour, dashed=level == 99))
        good = [(p, _offered(p) or 0.0, p.summary.good_rate) for p in swept]
        marks = [_mark(p, x, y, f"{y:.2f} of {x:.2f} requests/s good") for p, x, y in good]
        goodput.append(_connect(arm, marks, colour))
    limit = [] if slo.ttft is None else [Rule(1000 * slo.ttft, f"objective {1000 * slo.ttft:g} ms")]
    titles = ("Latency over throughput", "achieved, requests/s", "median TTFT, ms")
    charts = [Chart(*titles, curves, limit, y_scale="log", x_zero=True)]
    if swept := open_points(points):
        titles = ("Latency over rate", "offered, requests/s", "TTFT from the scheduled time, ms")
        charts.append(Chart(*titles, sweep, limit, y_scale="log", x_zero=True))
        most = max(_offered(point) or 0.0 for point in swept)
        goodput.append(Series("all requests", path=[(0, 0), (most, most)], dashed=True, colour=5))
        titles = ("Goodput over rate", "offered, requests/s", "within the objective, requests/s")
        charts.append(Chart(*titles, goodput, x_zero=True, y_zero=True))
    return charts


def _connect(
    name: str, marks: Sequence[Mark | None], colour: int, *, dashed: bool = False
) -> Series:
    return Series(name, [mark for mark in marks if mark], dashed=dashed, colour=colour)


def _mark_latency(point: Point, x: float, level: int) -> Mark | None:
    """A percentile of the TTFT with its interval; None where nothing was answered."""
    times = point.summary.ttft
    if times is None:
        return None
    value, low, high = (1000 * end for end in dataclasses.astuple(times.at(level)))
    text = f"TTFT p{level} {value:.0f} ms ({low:.0f}–{high:.0f})"
    text += f"\n{point.summary.request_rate:.2f} requests/s achieved"
    return _mark(point, x, value, text, low, high)


def _mark(
    point: Point, x: float, y: float, text: str, low: float | None = None, high: float | None = None
) -> Mark:
    lines = [f"{point.arm}, {point.load.describe()}", text, f"{point.summary.requests} requests"]
    tip = "\n".join(lines if point.valid else [*lines, "not valid"])
    return Mark(x, y, tip, low, high, not point.valid, point.runs[0].link())


def _offered(point: Point) -> float | None:
    """Requests due a second, by the schedule; None in a closed loop."""
    return None if point.load.rate is None else point.summary.offered_rate or point.load.rate


def _by_arm(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    names = dict.fromkeys(point.arm for point in points)
    return [(name, [p for p in points if p.arm == name]) for name in names]
