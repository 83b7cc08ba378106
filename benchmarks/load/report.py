"""Report of a paired experiment: one HTML file that loads nothing, ``points.csv``, and JSON.

Points that are not valid are hollow in the charts and not on the solid lines.
"""

from __future__ import annotations

import csv
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.metrics import ServerMetrics
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
from benchmarks.load.settings import CACHES, Slo, Workload
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

_Columns = Mapping[str, Callable[[Point], Cell | str]]
"""Head of each column, and its cell in the row of a point."""


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
        *_build_figures(points, compared, slo),
        _build_runs(runs),
        _build_settings(paired, runs),
    ]
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
        sections=[section for section in sections if section.charts or section.tables],
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


def _build_figures(
    points: Sequence[Point], compared: Sequence[Comparison], slo: Slo
) -> list[Section]:
    """Charts, ratios, rates, latencies and the server's own figures; without points, nothing."""

    def per_point(columns: _Columns) -> list[Table]:
        head: _Columns = {
            "load": lambda p: p.load.title,
            "arm": lambda p: p.arm if p.valid else Cell(p.arm, "not valid", tone="bad"),
        }
        cells = {**head, **columns}
        rows = [[cell(point) for cell in cells.values()] for point in points]
        return [Table("", list(cells), rows, "ll")] if rows else []

    def metrics(point: Point) -> ServerMetrics:
        return point.runs[0].result.metrics

    def visual_tokens(point: Point) -> str:
        before, after = metrics(point).visual_tokens_before, metrics(point).visual_tokens_after
        return "not counted" if before is None else f"{before:.0f} → {after or 0:.0f}"

    def kv_use(point: Point) -> str:
        peak = metrics(point).peak_kv_use
        return "not reported" if peak is None else f"{100 * peak:.1f}"

    sweeps = []
    for arm, swept in _by_arm(open_points(points)):
        sweep = build_sweep(swept, slo)
        note = "reached" if sweep.saturated else "not reached: try higher rates"
        sweeps.append([arm, sweep.knee, sweep.highest, note])
    first_token: _Columns = {
        "requests": lambda p: str(p.summary.requests),
        **{f"TTFT p{level}, ms": _percentile_cell("TTFT", level) for level in LEVELS},
        "offered/s": lambda p: "–" if (rate := _offered(p)) is None else f"{rate:.2f}",
        "achieved/s": lambda p: f"{p.summary.request_rate:.2f}",
        "goodput, %": lambda p: _estimate_cell(p.summary.goodput, 100),
    }
    later = {
        f"{name} p{level}, ms": _percentile_cell(name, level)
        for name in ("ITL", "TPOT", "E2E")
        for level in (50, 99)
    }
    of_server: _Columns = {
        "images/s": lambda p: f"{p.summary.image_rate:.2f}",
        "output tokens/s": lambda p: f"{p.summary.output_token_rate:.1f}",
        "prompt tokens": lambda p: f"{p.summary.prompt_tokens or 0:.1f}",
        "visual tokens": visual_tokens,
        "peak KV use, %": kv_use,
        "image cache hits": lambda p: format_hits(
            metrics(p).mm_cache_hits, metrics(p).mm_cache_queries
        ),
        "prefix cache hits (tokens)": lambda p: format_hits(
            metrics(p).prefix_cache_hits, metrics(p).prefix_cache_queries
        ),
    }
    return [
        Section(
            "Charts",
            ["Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click it "
             "for its records."],
            draw_charts(points, slo) if points else [],
        ),
        _build_ratios(compared),
        Section(
            "Knee and highest rate, requests/s",
            [f"Objective: {slo.describe()} for 99 % of requests. Knee: the highest rate that the "
             f"server keeps up with, median TTFT at most {KNEE:g} times that of the lowest valid "
             "rate. The highest rate within the objective is kept up with, too. Only measured "
             "rates, two of them where a run between them is not valid."],
            tables=[Table("", ["arm", "knee", "within the objective", "saturation"], sweeps, "l")]
            if sweeps else [],
        ),
        Section(
            "Time to first token",
            ["All passes together; in an open loop from the scheduled time, which a closed loop "
             "does not have. Goodput: the share of requests within the objective. †: too few "
             "requests for this percentile."],
            tables=per_point(first_token),
        ),
        Section(
            "After the first token",
            ["ITL: gaps between deltas, which may contain more than one token. TPOT: by the "
             "server's count of tokens. E2E: to the last text."],
            tables=per_point(later),
        ),
        Section(
            "Figures of the server",
            ["From its /metrics, first pass, and usage; visual tokens before and "
             "after pruning, as the plugin counts them. Token throughput is for information only: "
             "pruning lowers it."],
            tables=per_point(of_server),
            folded=True,
        ),
    ]  # fmt: skip


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
    return Section(f"Against {against}", [text], tables=tables if rows else [])


def _build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict and notes, and links to its files."""
    rows: list[Row] = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.describe(),
            Cell(
                run.result.verdict.describe(),
                "; ".join(run.result.verdict.notes),
                tone="" if run.result.verdict.valid else "bad",
            ),
            Cell(f"{len(run.records)} requests", link=run.link()),
            Cell("run.json", link=run.link(RESULT)),
        ]
        for run in runs
    ]
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
    settings = _describe_workload(paired.workload)
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
    mixes: dict[str, Mapping[Any, float]] = {
        "longer side, pixels": workload.sides,
        "aspect": workload.aspects,
        "images a request": workload.images,
        "formats": workload.formats,
        "words in a question": workload.words,
    }
    described = {}
    for name, mix in mixes.items():
        total = sum(mix.values())
        shares = [f"{value} ({100 * weight / total:.0f} %)" for value, weight in mix.items()]
        described[name] = ", ".join(shares) if len(mix) > 1 else str(*mix)
    return {
        "cache state": f"{workload.cache}: {CACHES[workload.cache]}",
        "requests": f"{workload.requests} a run, and {workload.warm_up} before the clock starts",
        "answers": f"{workload.output_tokens} tokens each, greedy",
        **({"data": workload.data} if workload.data else {}),
        **described,
        "seed": str(workload.seed),
    }


def _percentile_cell(latency: str, level: int) -> Callable[[Point], Cell]:
    def cell(point: Point) -> Cell:
        times = point.summary.latency(latency)
        enough = {q.level: q.enough for q in times.quantiles} if times else {}
        mark = "" if enough.get(level) else "†"
        return _estimate_cell(times.at(level) if times else None, 1000, mark)

    return cell


def _estimate_cell(estimate: Estimate | None, unit: float, mark: str = "") -> Cell:
    if estimate is None:
        return Cell("no answer")
    figures = [unit * figure for figure in dataclasses.astuple(estimate)]
    digits = 0 if figures[0] > 100 else 1
    value, low, high = (f"{figure:,.{digits}f}" for figure in figures)
    return Cell(value + mark, f"{low}–{high}")


def draw_charts(points: Sequence[Point], slo: Slo) -> list[Chart]:
    """All charts for which there are points; an arm has the same colour in every chart."""
    curves, sweep, goodput = [], [], []
    for colour, (arm, mine) in enumerate(_by_arm(points)):
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        closed = sorted((p for p in mine if p.load.users), key=lambda p: p.load.users or 0)
        swept = open_points(mine)
        for kind, line in (("closed", closed), ("open", swept)):
            if line:
                marks = [_mark_latency(p, p.summary.request_rate, 50) for p in line]
                name = f"{arm}, {kind} loop"
                curves.append(_draw_line(name, marks, colour, dashed=kind == "open"))
        for level in (50, 99):
            marks = [_mark_latency(p, _offered(p) or 0.0, level) for p in swept]
            sweep.append(_draw_line(f"{arm}, p{level}", marks, colour, dashed=level == 99))
        good = [(p, _offered(p) or 0.0, p.summary.good_rate) for p in swept]
        marks = [_mark(p, x, y, f"{y:.2f} of {x:.2f} requests/s good") for p, x, y in good]
        goodput.append(_draw_line(arm, marks, colour))
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


def _draw_line(
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
