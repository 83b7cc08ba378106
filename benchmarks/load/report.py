"""Report of a paired experiment: one HTML file that loads nothing, ``points.csv``, and JSON.

Points that are not valid are hollow in the charts and not on the solid lines.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.load.compare import (
    FIGURES,
    KNEE,
    LATENCIES,
    Point,
    Run,
    answer_question,
    build_sweep,
    compare_arms,
    group_runs,
    open_points,
)
from benchmarks.load.experiment import Paired, read_paired
from benchmarks.load.result import LEVELS, RESULT, format_hits, write_csv
from benchmarks.load.schedule import Slo
from benchmarks.load.settings import CACHES, Workload
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
NO_ANSWER = Cell("no answer")


def write_report(folder: Path) -> dict[str, object]:
    """Write ``report.html`` and ``points.csv`` of an experiment; return what ``--json`` prints."""
    paired = read_paired(folder)
    runs, plan, path = paired.runs(folder), paired.plan, folder / REPORT
    # Closed loops before open ones, each by load; arms of one load stay in their order.
    points = sorted(
        group_runs(runs),
        key=lambda p: (p.load.rate is not None, p.load.users or 0, p.load.rate or 0.0),
    )
    answer = answer_question(points, plan.slo, paired.broken)
    valid = sum(run.result.verdict.valid for run in runs)
    requests = sum(run.result.summary.requests for run in runs)
    sections = _build_sections(paired, runs, points)
    document = Document(
        title=f"Load test: {', '.join(arm.name for arm in plan.arms)}",
        answer=answer.sentence,
        tone=answer.tone,
        warnings=answer.limits,
        facts=[
            f"{valid} of {len(runs)} runs are valid",
            f"{requests:,} requests counted",
            f"{plan.passes} passes",
            f"objective: {plan.slo.describe()}",
            CACHES[plan.workload.cache],
        ],
        sections=[section for section in sections if section.tables or section.charts],
    )
    path.write_text(render_document(document))
    described = [_describe_point(point) for point in points]
    write_csv(folder / POINTS_CSV, described)
    return {
        "answer": answer.sentence,
        "tone": answer.tone,
        "limits": list(answer.limits),
        "report": str(path),
        "points": described,
        "comparisons": [each.model_dump(mode="json") for each in compare_arms(points)],
    }


def _describe_point(point: Point) -> dict[str, object]:
    """One arm at one load, times in milliseconds, each estimate with its interval."""
    row: dict[str, object] = {
        "load": point.load.label,
        "arm": point.arm,
        "valid": point.valid,
        "passes": len(point.runs),
        "requests": point.requests,
        "offered_rate": point.offered if point.load.rate is not None else None,
        "achieved_rate": point.completed,
    }
    estimates: dict[str, tuple[Estimate | None, float]] = {"goodput": (point.goodput, 1.0)}
    for name in LATENCIES:
        times = point.distribution(name)
        for level in LEVELS:
            estimates[f"{name.lower()}_p{level}_ms"] = (times.at(level) if times else None, 1000.0)
    for name, (estimate, unit) in estimates.items():
        figures = dataclasses.astuple(estimate) if estimate else (None, None, None)
        for end, figure in zip(("", "_low", "_high"), figures, strict=True):
            row[name + end] = None if figure is None else round(unit * figure, 4)
    return row


def _build_sections(paired: Paired, runs: Sequence[Run], points: Sequence[Point]) -> list[Section]:
    """All sections; those without content have neither tables nor charts."""
    charts_text = (
        "Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click "
        "it for its records."
    )
    return [
        Section("Charts", [charts_text], draw_charts(points, paired.plan.slo) if points else []),
        _build_ratios(points),
        _build_sweeps(points, paired.plan.slo),
        _build_latencies(points),
        _build_decoding(points),
        _build_server_figures(points),
        _build_runs(runs),
        _build_settings(paired, runs),
    ]


def _build_ratios(points: Sequence[Point]) -> Section:
    """Every arm against the first, load by load."""
    compared = compare_arms(points)
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
    return Section(f"Against {against}", [text], tables=tables if rows else [])


def _build_sweeps(points: Sequence[Point], slo: Slo) -> Section:
    """The knee and the highest rate of each arm."""
    rows = []
    for arm, mine in _by_arm(open_points(points)):
        sweep = build_sweep(mine, slo)
        note = "reached" if sweep.saturated else "not reached: try higher rates"
        rows.append([arm, str(sweep.knee), str(sweep.highest), note])
    return _table_section(
        "Knee and highest rate, requests/s",
        f"Objective: {slo.describe()} for 99 % of requests. Knee: the highest rate that the "
        f"server keeps up with, median TTFT at most {KNEE:g} times that of the lowest valid "
        "rate. The highest rate within the objective is kept up with, too. Only measured "
        "rates, two of them where a run between them is not valid.",
        ["arm", "knee", "within the objective", "saturation"],
        rows,
        left=1,
    )


def _build_latencies(points: Sequence[Point]) -> Section:
    """Times to the first token, all passes together."""
    rows: list[Row] = []
    for point in points:
        offered = point.offered if point.load.rate is not None else None
        rows.append(
            [
                *_head_cells(point),
                str(point.requests),
                *_percentile_cells(point, "TTFT", LEVELS),
                "–" if offered is None else f"{offered:.2f}",
                f"{point.completed:.2f}",
                _estimate_cell(point.goodput, 100),
            ]
        )
    head = ["load", "arm", "requests", *(f"TTFT p{level}, ms" for level in LEVELS)]
    return _table_section(
        "Time to first token",
        "All passes together; in an open loop from the scheduled time, which a closed loop "
        "does not have. Goodput: the share of requests within the objective. †: too few "
        "requests for this percentile.",
        [*head, "offered/s", "achieved/s", "goodput, %"],
        rows,
    )


def _build_decoding(points: Sequence[Point]) -> Section:
    """Times after the first token, and of the whole answer."""
    names, levels = ("ITL", "TPOT", "E2E"), (50, 99)
    rows = [
        [*_head_cells(point), *(c for n in names for c in _percentile_cells(point, n, levels))]
        for point in points
    ]
    return _table_section(
        "After the first token",
        "ITL: gaps between deltas, which may contain more than one token. TPOT: by the "
        "server's count of tokens. E2E: to the last text.",
        ["load", "arm", *(f"{name} p{level}, ms" for name in names for level in levels)],
        rows,
    )


def _build_server_figures(points: Sequence[Point]) -> Section:
    """The server's own figures."""
    rows: list[Row] = []
    for point in points:
        before = point.mean(lambda r: r.metrics.visual_tokens_before)
        after = point.mean(lambda r: r.metrics.visual_tokens_after)
        kv = point.mean(lambda r: r.metrics.peak_kv_use)
        summary, metrics = point.runs[0].result.summary, point.runs[0].result.metrics
        rows.append(
            [
                *_head_cells(point),
                f"{summary.image_rate:.2f}",
                f"{summary.output_token_rate:.1f}",
                f"{summary.prompt_tokens or 0:.1f}",
                "not counted" if before is None else f"{before:.0f} → {after or 0:.0f}",
                "not reported" if kv is None else f"{100 * kv:.1f}",
                format_hits(metrics.mm_cache_hits, metrics.mm_cache_queries),
                format_hits(metrics.prefix_cache_hits, metrics.prefix_cache_queries),
            ]
        )
    head = [
        "load", "arm", "images/s", "output tokens/s", "prompt tokens", "visual tokens",
        "peak KV use, %", "image cache hits", "prefix cache hits (tokens)",
    ]  # fmt: skip
    return _table_section(
        "Figures of the server",
        "From its /metrics and usage, first pass; visual tokens before and after pruning, as "
        "the plugin counts them. Token throughput is for information only: pruning lowers it.",
        head,
        rows,
        folded=True,
    )


def _build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict, and links to its files; notes where there are any."""
    noted = any(run.result.verdict.notes for run in runs)
    rows: list[Row] = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.describe(),
            Cell(run.result.verdict.describe(), tone="" if run.result.verdict.valid else "bad"),
            *(["; ".join(run.result.verdict.notes)] if noted else []),
            Cell(f"{len(run.records)} requests", link=run.link()),
            Cell("run.json", link=run.link(RESULT)),
        ]
        for run in runs
    ]
    head = ["pass", "arm", "load", "verdict", *(["notes"] if noted else []), "records", "figures"]
    return Section("Every run, in order of time", tables=[Table("", head, rows, "l" * len(head))])


def _build_settings(paired: Paired, runs: Sequence[Run]) -> Section:
    """Command, arms, workload, machine."""
    arms = []
    for arm in paired.plan.arms:
        info = next((run.result.server for run in runs if run.arm == arm.name), {})
        served = arm.url or " ".join([arm.model, *arm.flags])
        facts = ", ".join(f"{key} {value}" for key, value in info.items())
        arms.append([arm.name, (arm.digest or "none")[:16], served, facts])
    settings = _describe_workload(paired.plan.workload)
    settings |= runs[0].result.environment if runs else {}
    busy = [run.result.environment["load average"] for run in runs]
    settings["load average before each run"] = ", ".join(busy)
    head = ["arm", "digest of the state", "served as", "server information"]
    rows = [[key, value] for key, value in settings.items()]
    return Section(
        "Settings",
        code=shlex.join(paired.command),
        tables=[Table("", head, arms, "llll"), Table("", ["setting", "value"], rows, "ll")],
        folded=True,
    )


def _describe_workload(workload: Workload) -> dict[str, str]:
    def describe(mix: tuple[tuple[object, float], ...]) -> str:
        """Each value with its share."""
        if len(mix) == 1:
            return f"{mix[0][0]}"
        total = sum(weight for _, weight in mix)
        return ", ".join(f"{value} ({100 * weight / total:.0f} %)" for value, weight in mix)

    data = f"{workload.data}, {workload.data_digest}"
    return {
        "cache state": f"{workload.cache}: {CACHES[workload.cache]}",
        "requests": f"{workload.requests} a run, and {workload.warm_up} before the clock starts",
        "answers": f"{workload.output_tokens} tokens each, greedy",
        **({"data": data} if workload.data else {}),
        "longer side, pixels": describe(workload.sides),
        "aspect": describe(workload.aspects),
        "images a request": describe(workload.images),
        "formats": describe(workload.formats),
        "words in a question": describe(workload.words),
        "seed": str(workload.seed),
    }


def _table_section(
    title: str,
    text: str,
    head: Sequence[str],
    rows: Sequence[Row],
    *,
    left: int = 2,
    folded: bool = False,
) -> Section:
    tables = [Table("", head, rows, "l" * left)] if rows else []
    return Section(title, [text], tables=tables, folded=folded)


def _head_cells(point: Point) -> list[Cell]:
    arm = Cell(point.arm) if point.valid else Cell(point.arm, "not valid", tone="bad")
    return [Cell(point.load.title), arm]


def _percentile_cells(point: Point, latency: str, levels: Sequence[int]) -> list[Cell]:
    times = point.distribution(latency)
    if times is None:
        return [NO_ANSWER for _ in levels]
    enough = {quantile.level: quantile.enough for quantile in times.quantiles}
    return [_estimate_cell(times.at(level), 1000, "" if enough[level] else "†") for level in levels]


def _estimate_cell(estimate: Estimate | None, unit: float, mark: str = "") -> Cell:
    if estimate is None:
        return NO_ANSWER
    figures = [unit * figure for figure in dataclasses.astuple(estimate)]
    digits = 0 if figures[0] > 100 else 1
    value, low, high = (f"{figure:,.{digits}f}" for figure in figures)
    return Cell(value + mark, f"{low}–{high}")


def draw_charts(points: Sequence[Point], slo: Slo) -> list[Chart]:
    """All charts for which there are points; an arm has the same colour in every chart."""
    curves, sweep = [], []
    for colour, (arm, mine) in enumerate(_by_arm(points)):
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        closed = sorted((p for p in mine if p.load.users), key=lambda p: p.load.users or 0)
        for kind, chosen in (("closed", closed), ("open", open_points(mine))):
            if chosen:
                line = _draw_line(chosen, lambda p: p.completed, 50, colour, f"{arm}, {kind} loop")
                curves.append(dataclasses.replace(line, dashed=kind == "open"))
        for level in (50, 99):
            line = _draw_line(open_points(mine), _offered, level, colour, f"{arm}, p{level}")
            sweep.append(dataclasses.replace(line, dashed=level == 99))
    limit = [] if slo.ttft is None else [Rule(1000 * slo.ttft, f"objective {1000 * slo.ttft:g} ms")]
    titles = ("Latency over throughput", "achieved, requests/s", "median TTFT, ms")
    charts = [Chart(*titles, curves, limit, y_scale="log", x_zero=True)]
    if swept := open_points(points):
        titles = ("Latency over rate", "offered, requests/s", "TTFT from the scheduled time, ms")
        charts.append(Chart(*titles, sweep, limit, y_scale="log", x_zero=True))
        charts.append(_draw_goodput(swept))
    return charts


def _draw_line(
    points: Sequence[Point], x: Callable[[Point], float], level: int, colour: int, name: str
) -> Series:
    """A percentile of the TTFT, with its intervals."""
    marks = []
    for point in points:
        times = point.distribution("TTFT")
        if times is not None:
            value, low, high = (1000 * end for end in dataclasses.astuple(times.at(level)))
            text = f"TTFT p{level} {value:.0f} ms ({low:.0f}–{high:.0f})"
            text += f"\n{point.completed:.2f} requests/s achieved"
            tip, link = _describe_mark(point, text), point.runs[0].link()
            marks.append(Mark(x(point), value, tip, low, high, not point.valid, link))
    return Series(name, marks, colour=colour)


def _draw_goodput(points: Sequence[Point]) -> Chart:
    """Requests a second that met the objective, over the offered rate."""
    series = []
    for colour, (arm, mine) in enumerate(_by_arm(points)):
        marks = []
        for point in mine:
            x, y, link = _offered(point), point.good, point.runs[0].link()
            tip = _describe_mark(point, f"{y:.2f} of {x:.2f} requests/s good")
            marks.append(Mark(x, y, tip, hollow=not point.valid, link=link))
        series.append(Series(arm, marks, colour=colour))
    most = max(map(_offered, points))
    series.append(Series("all requests", path=[(0, 0), (most, most)], dashed=True, colour=5))
    titles = ("Goodput over rate", "offered, requests/s", "within the objective, requests/s")
    return Chart(*titles, series, x_zero=True, y_zero=True)


def _describe_mark(point: Point, text: str) -> str:
    lines = [f"{point.arm}, {point.load.describe()}", text, f"{point.requests} requests"]
    return "\n".join(lines if point.valid else [*lines, "not valid"])


def _offered(point: Point) -> float:
    return point.offered or point.load.rate or 0.0


def _by_arm(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    names = dict.fromkeys(point.arm for point in points)
    return [(name, [p for p in points if p.arm == name]) for name in names]
