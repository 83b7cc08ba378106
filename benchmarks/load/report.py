"""Report of a paired experiment: one HTML file that loads nothing, ``points.csv``, and JSON.

Points that are not valid are hollow in the charts and not on the solid lines.
"""

from __future__ import annotations

import csv
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from benchmarks.common.report import format_estimate
from benchmarks.load.compare import (
    FIGURES,
    Comparison,
    Point,
    Run,
    answer_question,
    compare_arms,
    find_limits,
    group_by_arm,
    group_runs,
    list_limits,
    select_open,
)
from benchmarks.load.paired import Paired, read_paired
from benchmarks.load.result import LATENCIES, LEVELS, RECORDS, RESULT
from benchmarks.load.settings import CACHES, SendingOptions
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


def write_report(folder: Path) -> tuple[dict[str, object], int]:
    """Write ``report.html`` and ``points.csv`` of an experiment.

    Returns what ``--json`` prints, and the number of runs that are not valid.
    """
    paired, runs = read_paired(folder)
    points, slo = group_runs(runs), paired.options
    (sentence, tone), limits = answer_question(points, slo), [*list_limits(points, paired.broken)]
    compared = compare_arms(points)
    invalid = sum(not run.result.valid for run in runs)
    sections = [
        Section(
            "Latency and throughput",
            ["Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click it "
             "for its records."],
            [_draw_chart(points, slo)],
        ),
        _build_ratios(compared),
        _build_sweeps(points, slo),
        *_build_figures(points),
        _build_runs(runs),
        _build_settings(paired, runs),
    ]  # fmt: skip
    document = Document(
        title=f"Load test: {', '.join(arm.name for arm in paired.arms)}",
        answer=sentence,
        tone=tone,
        warnings=limits,
        facts=[
            f"{len(runs) - invalid} of {len(runs)} runs are valid",
            f"{sum(run.result.summary.requests for run in runs):,} requests counted",
            f"{paired.options.passes} passes",
            f"objective: {slo.describe_objective()}",
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
    report: dict[str, object] = {
        "answer": sentence,
        "tone": tone,
        "limits": limits,
        "report": str(folder / REPORT),
        "points": described,
        "comparisons": [comparison.model_dump(mode="json") for comparison in compared],
    }
    return report, invalid


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
    estimates = {"goodput": (summary.goodput, 1.0)}
    for name in LATENCIES:
        for level in LEVELS:
            estimates[f"{name.lower()}_p{level}_ms"] = (summary.percentile(name, level), 1000.0)
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
    for comparison in compared:
        key, ratio = (comparison.load.title, comparison.arm), comparison.ratio
        cell = Cell("not valid")
        if ratio is not None:
            tone: CellTone = "good" if ratio.high < 1 else "bad" if ratio.low > 1 else ""
            cell = Cell(f"{ratio.value:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", tone=tone)
        rows.setdefault(key, [*key]).append(cell)
        by_pass = ", ".join(f"{value:.3f}" for value in comparison.by_pass)
        passes.setdefault(key, [*key]).append(by_pass)
    head = ["load", "arm", *(f"{latency} p{level}" for latency, level in FIGURES)]
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


def _build_sweeps(points: Sequence[Point], slo: SendingOptions) -> Section:
    """Knee and highest rate of each arm."""
    rows = []
    for arm, swept in group_by_arm(select_open(points)).items():
        knee, highest, saturated = find_limits(swept, slo)
        note = "reached" if saturated else "not reached: try higher rates"
        rows.append([arm, knee, highest, note])
    return Section(
        "Knee and highest rate, requests/s",
        [f"Objective: {slo.describe_objective()} for 99 % of requests. Knee: the highest rate that "
         "the server keeps up with, median TTFT at most twice that of the lowest valid rate. "
         "The highest rate within the objective is kept up with, too. Only measured rates, two of "
         "them where a run between them is not valid."],
        tables=[Table("", ["arm", "knee", "within the objective", "saturation"], rows, "l")],
    )  # fmt: skip


def _build_figures(points: Sequence[Point]) -> list[Section]:
    """Latencies, rates and goodput."""
    views = (
        (
            "Time to first token",
            "All passes together; in an open loop from the scheduled time, which a closed loop "
            "does not have. Goodput: the share of requests within the objective. †: too few "
            "requests for this percentile.",
            [("TTFT", level) for level in LEVELS],
        ),
        (
            "After the first token",
            "ITL: gaps between deltas, which may contain more than one token. TPOT: by the "
            "server's count of tokens. E2E: to the last text.",
            [(name, level) for name in ("ITL", "TPOT", "E2E") for level in (50, 99)],
        ),
    )
    sections = []
    for title, text, figures in views:
        head: Sequence[str] = ()
        rows: list[Row] = []
        for point in points:
            summary, offered = point.summary, _offered(point)
            cells = {}
            for name, level in figures:
                figure = summary.percentile(name, level)
                few = summary.mark_few(level) if figure else ""
                cells[f"{name} p{level}, ms"] = _format(figure, 1000) + few
            if title == views[0][0]:
                sizes = {"requests": f"{summary.requests}"}
                sizes["prompt tokens"] = f"{summary.prompt_tokens:.1f}"
                cells = sizes | cells
                cells["offered/s"] = "–" if offered is None else f"{offered:.2f}"
                cells["achieved/s"] = f"{summary.request_rate:.2f}"
                cells["goodput, %"] = _format(summary.goodput, 100)
            arm = point.arm if point.valid else Cell(point.arm, "not valid", tone="bad")
            rows.append([point.load.title, arm, *cells.values()])
            head = ["load", "arm", *cells]
        sections.append(Section(title, [text], tables=[Table("", head, rows, "ll")]))
    return sections


def _build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict and notes, and links to its files."""
    rows: list[Row] = []
    for run in runs:
        result = run.result
        rows.append(
            [
                f"{run.number + 1}",
                run.arm,
                result.load.describe(),
                Cell(result.verdict, tone="" if result.valid else "bad"),
                Cell(f"{len(run.records)} requests", link=_link(run)),
                Cell("run.json", link=_link(run, RESULT)),
            ]
        )
    head = ["pass", "arm", "load", "verdict", "records", "figures"]
    return Section("Every run, in order of time", tables=[Table("", head, rows, "l" * len(head))])


def _build_settings(paired: Paired, runs: Sequence[Run]) -> Section:
    """Command, arms, workload, machine."""
    arms = [
        [arm.name, (arm.digest or "none")[:16], arm.url or " ".join([arm.model, *arm.flags])]
        for arm in paired.arms
    ]
    settings: dict[str, object] = {
        name.replace("_", "-"): value for name, value in paired.workload.model_dump().items()
    }
    settings |= runs[0].result.environment if runs else {}
    busy = [run.result.environment["load average"] for run in runs]
    settings["load average before each run"] = ", ".join(busy)
    head = ["arm", "digest of the state", "served as"]
    rows = [[key, str(value)] for key, value in settings.items()]
    return Section(
        "Settings",
        code=shlex.join(paired.command),
        tables=[Table("", head, arms, "lll"), Table("", ["setting", "value"], rows, "ll")],
        folded=True,
    )


def _format(estimate: Estimate | None, unit: float) -> str:
    """A figure and its interval, which the table puts under it."""
    if estimate is None:
        return "no answer"
    return format_estimate(estimate, unit, 0 if unit * estimate.value > 100 else 1)


def _offered(point: Point) -> float | None:
    """Requests due a second, by the schedule; None in a closed loop."""
    return None if point.load.rate is None else point.summary.offered_rate or point.load.rate


def _link(run: Run, name: str = RECORDS) -> str:
    """Link from the report to a file of the run, such as the one that has every request."""
    return quote(f"{run.folder}/{name}")


def _draw_chart(points: Sequence[Point], slo: SendingOptions) -> Chart:
    """Median TTFT over the achieved rate; open loops are dashed."""
    series = []
    for colour, (arm, of_arm) in enumerate(group_by_arm(points).items()):
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        swept = select_open(of_arm)
        closed = of_arm[: len(of_arm) - len(swept)]
        for kind, line in (("closed", closed), ("open", swept)):
            marks = []
            for point in line:
                summary, median = point.summary, point.summary.percentile("TTFT", 50)
                if median is None:
                    continue
                value, low, high = (1000 * end for end in dataclasses.astuple(median))
                tip = [
                    f"{arm}, {point.load.describe()}",
                    f"TTFT p50 {value:.0f} ms ({low:.0f}–{high:.0f})",
                    f"{summary.request_rate:.2f} requests/s achieved",
                    f"{summary.requests} requests" + ("" if point.valid else "\nnot valid"),
                ]
                link = _link(point.runs[0])
                rate, text = summary.request_rate, "\n".join(tip)
                marks.append(Mark(rate, value, text, low, high, not point.valid, link))
            if marks:
                name = f"{arm}, {kind} loop"
                series.append(Series(name, marks, dashed=kind == "open", colour=colour))
    limit = [Rule(slo.slo_ttft, f"objective {slo.slo_ttft:g} ms")] if slo.slo_ttft else []
    titles = ("Latency over throughput", "achieved, requests/s", "median TTFT, ms")
    return Chart(*titles, series, limit, y_scale="log", x_zero=True)
