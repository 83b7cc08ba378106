"""Report of a paired experiment: one HTML file that loads nothing, and ``points.csv``.

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

REPORT, _POINTS = "report.html", "points.csv"


def write_report(folder: Path) -> tuple[str, int]:
    """Write ``report.html`` and ``points.csv`` of an experiment.

    Returns the answer in a sentence, and the number of runs that are not valid.
    """
    paired, runs = read_paired(folder)
    points, slo = group_runs(runs), paired.options
    sentence, tone = answer_question(points, slo)
    invalid = sum(not run.result.valid for run in runs)
    chart = Section(
        "Latency and throughput",
        ["Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click it "
         "for its records."],
        [_draw_chart(points, slo)],
    )  # fmt: skip
    tables = [
        _build_ratios(compare_arms(points)),
        _build_sweeps(points, slo),
        _build_figures(points),
        _build_runs(runs),
        _build_settings(paired, runs),
    ]
    document = Document(
        title=f"Load test: {', '.join(arm.name for arm in paired.arms)}",
        answer=sentence,
        tone=tone,
        warnings=[*list_limits(points, paired.broken)],
        facts=[
            f"{len(runs) - invalid} of {len(runs)} runs are valid",
            f"{sum(run.result.summary.requests for run in runs):,} requests counted",
            f"{paired.options.passes} passes",
            f"objective: {slo.describe_objective()}",
            CACHES[paired.options.cache],
        ],
        sections=[chart, *(s for s in tables if any(table.rows for table in s.tables))],
    )
    (folder / REPORT).write_text(render_document(document))
    names = _list_latencies(points)
    described = [_describe_point(point, names) for point in points]
    with (folder / _POINTS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(described[0]) if described else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(described)
    return sentence, invalid


def _list_latencies(points: Sequence[Point]) -> list[str]:
    """The kinds of latency; TTFAT only where some model thinks."""
    thinks = any(point.summary.thinks for point in points)
    return [name for name in LATENCIES if thinks or name != "TTFAT"]


def _describe_point(point: Point, latencies: Sequence[str]) -> dict[str, object]:
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
    for name in latencies:
        for level in LEVELS:
            estimates[f"{name.lower()}_p{level}_ms"] = (summary.percentile(name, level), 1000.0)
    for name, (estimate, unit) in estimates.items():
        figures = dataclasses.astuple(estimate) if estimate else (None, None, None)
        for end, figure in zip(("", "_low", "_high"), figures, strict=True):
            row[name + end] = None if figure is None else round(unit * figure, 4)
    return row


def _build_ratios(compared: Sequence[Comparison]) -> Section:
    """Every arm against the first, load by load."""
    rows: dict[tuple[str, str], list[Cell | str]] = {}
    for comparison in compared:
        key, ratio = (comparison.load.title, comparison.arm), comparison.ratio
        cell = Cell("not valid")
        if ratio is not None:
            tone: CellTone = "good" if ratio.high < 1 else "bad" if ratio.low > 1 else ""
            by_pass = ", ".join(f"{value:.3f}" for value in comparison.by_pass)
            under = f"{ratio.low:.3f}–{ratio.high:.3f}; passes {by_pass}"
            cell = Cell(f"{ratio.value:.3f}", under, tone=tone)
        rows.setdefault(key, [*key]).append(cell)
    head = ["load", "arm", *(f"{latency} p{level}" for latency, level in FIGURES)]
    against = compared[0].against if compared else ""
    text = (
        f"Ratios to {against} on the same requests, with 95 % intervals, then those of each pass: "
        "below 1 is less. An interval covers the choice of requests, but not differences between "
        "passes, so compare the passes too."
    )
    return Section(f"Against {against}", [text], tables=[Table("", head, [*rows.values()], "ll")])


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


def _build_figures(points: Sequence[Point]) -> Section:
    """Rates, goodput and the time to the first token; then the other latencies."""

    def describe(estimate: Estimate | None, unit: float, few: str = "") -> str:
        """A figure and its interval, which the table puts under it."""
        if estimate is None:
            return "no answer"
        return format_estimate(estimate, unit, 0 if unit * estimate.value > 100 else 1) + few

    first_tokens = [("TTFT", level) for level in LEVELS]
    if "TTFAT" in _list_latencies(points):
        first_tokens += [("TTFAT", level) for level in (50, 99)]
    later = [(name, level) for name in ("ITL", "TPOT", "E2E") for level in (50, 99)]
    tables = []
    for figures in (first_tokens, later):
        sizes = ["requests", "prompt tokens"] if figures is first_tokens else []
        rates = ["offered/s", "achieved/s", "goodput, %"] if figures is first_tokens else []
        rows: list[Row] = []
        for point in points:
            summary, offered = point.summary, _offered(point)
            cells = [
                describe(summary.percentile(name, level), 1000, summary.mark_few(level))
                for name, level in figures
            ]
            if figures is first_tokens:
                due = "–" if offered is None else f"{offered:.2f}"
                cells = [f"{summary.requests}", f"{summary.prompt_tokens:.1f}", *cells, due]
                cells += [f"{summary.request_rate:.2f}", describe(summary.goodput, 100)]
            arm = point.arm if point.valid else Cell(point.arm, "not valid", tone="bad")
            rows.append([point.load.title, arm, *cells])
        heads = [*sizes, *(f"{name} p{level}, ms" for name, level in figures), *rates]
        tables.append(Table("", ["load", "arm", *heads], rows, "ll"))
    text = (
        "All passes together; in an open loop from the scheduled time, which a closed loop does "
        "not have. TTFAT: to the first token after thoughts. Goodput: the share of requests within "
        "the objective. †: too few requests for this percentile. ITL: gaps between deltas, which "
        "may contain more than one token. TPOT: "
        "by the server's count of tokens. E2E: to the last token."
    )
    return Section("Rates and latencies", [text], tables=tables)


def _build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict and notes, and links to its files."""
    head = ["pass", "arm", "load", "verdict", "records", "figures"]
    rows: list[Row] = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.describe(),
            Cell(run.result.verdict, tone="" if run.result.valid else "bad"),
            Cell(f"{len(run.records)} requests", link=_link(run, RECORDS)),
            Cell("run.json", link=_link(run, RESULT)),
        ]
        for run in runs
    ]
    return Section("Every run, in order of time", tables=[Table("", head, rows, "l" * len(head))])


def _build_settings(paired: Paired, runs: Sequence[Run]) -> Section:
    """Command, arms, options, machine."""
    arms = [
        [arm.name, (arm.digest or "none")[:16], arm.url or " ".join([arm.model, *arm.flags])]
        for arm in paired.arms
    ]
    options, results = paired.options.model_dump(), [run.result for run in runs]
    settings = {name.replace("_", "-"): str(value) for name, value in options.items()}
    settings |= results[0].environment if results else {}
    busy = ", ".join(result.environment["load average"] for result in results)
    settings["load average before each run"] = busy
    head, rows = ["arm", "digest of the state", "served as"], [*map(list, settings.items())]
    return Section(
        "Settings",
        code=shlex.join(paired.command),
        tables=[Table("", head, arms, "lll"), Table("", ["setting", "value"], rows, "ll")],
        folded=True,
    )


def _offered(point: Point) -> float | None:
    """Requests due a second, by the schedule; None in a closed loop."""
    return None if point.load.rate is None else point.summary.offered_rate or point.load.rate


def _link(run: Run, name: str) -> str:
    """Link from the report to a file of the run."""
    return quote(f"{run.folder}/{name}")


def _draw_chart(points: Sequence[Point], slo: SendingOptions) -> Chart:
    """Median TTFT over the achieved rate; open loops are dashed."""
    series = []
    for colour, (arm, of_arm) in enumerate(group_by_arm(points).items()):
        # In order of load: beyond the knee throughput may fall, and the line turns back.
        swept = select_open(of_arm)
        for kind, line in (("closed", of_arm[: len(of_arm) - len(swept)]), ("open", swept)):
            marks = []
            for point in line:
                rate, median = point.summary.request_rate, point.summary.percentile("TTFT", 50)
                if median is None:
                    continue
                value, low, high = (1000 * end for end in dataclasses.astuple(median))
                tip = (
                    f"{arm}, {point.load.describe()}\n"
                    f"TTFT p50 {value:.0f} ms ({low:.0f}–{high:.0f})\n"
                    f"{rate:.2f} requests/s achieved\n{point.summary.requests} requests"
                ) + ("" if point.valid else "\nnot valid")
                link = _link(point.runs[0], RECORDS)
                marks.append(Mark(rate, value, tip, low, high, not point.valid, link))
            if marks:
                name = f"{arm}, {kind} loop"
                series.append(Series(name, marks, dashed=kind == "open", colour=colour))
    limit = [Rule(slo.slo_ttft, f"objective {slo.slo_ttft:g} ms")] if slo.slo_ttft else []
    titles = ("Latency over throughput", "achieved, requests/s", "median TTFT, ms")
    return Chart(*titles, series, limit, y_scale="log", x_zero=True)
