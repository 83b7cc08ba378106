"""HTML page that compares the arms of a paired experiment; it is one file that loads nothing else.

A figure covers all passes of an arm at a load; bootstrap draws resample all passes of a request
together. Runs that are not valid are drawn as hollow marks, and no ratio uses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from benchmarks.common.client import Record
from benchmarks.common.report import format_estimate
from benchmarks.load.result import (
    RECORDS,
    RESULT,
    Result,
    Summary,
    describe_few,
    estimate_ratio,
)
from benchmarks.load.settings import CACHES, Load, SendingOptions
from vllm_autoprune.report import (
    Cell,
    CellTone,
    Chart,
    Document,
    Mark,
    Row,
    Section,
    Series,
    Table,
    Tone,
)
from vllm_autoprune.statistics import Estimate

REPORT = "report.html"
_COMPARED = (("TTFT", 50), ("TTFT", 99), ("TPOT", 50), ("E2E", 50))
"""Latencies and percentiles by which arms are compared."""
_TABULATED = (
    ("TTFT", 50), ("TTFT", 90), ("TTFT", 95), ("TTFT", 99), ("TTFAT", 50), ("TTFAT", 99),
    ("ITL", 50), ("ITL", 99), ("TPOT", 50), ("TPOT", 99), ("E2E", 50), ("E2E", 99),
)  # fmt: skip


class Run(NamedTuple):
    """One pass of one arm at one load."""

    arm: str
    number: int
    folder: str
    """Path of the run's folder, relative to the report."""
    result: Result
    records: Sequence[Record]


@dataclasses.dataclass(frozen=True)
class Point:
    """All passes of one arm at one load."""

    arm: str
    load: Load
    runs: tuple[Run, ...]

    @property
    def valid(self) -> bool:
        """Whether every pass is valid."""
        return all(run.result.valid for run in self.runs)

    @cached_property
    def summary(self) -> Summary:
        """Figures of the measured requests of all passes."""
        return Summary.of(
            [run.records for run in self.runs], self.runs[0].result.options
        )

    @property
    def past_saturation(self) -> bool:
        """Whether most requests miss the objective or a run ended early: no higher rate is sent."""
        goodput = self.summary.goodput
        early = any(run.result.broken for run in self.runs)
        return early or goodput is None or goodput.value < 0.5


def _compare_points(
    point: Point, reference: Point, latency: str, level: int
) -> tuple[Estimate | None, list[float]]:
    """Ratio of a latency percentile to that of ``reference``, and the same ratio for each pass.

    A ratio below 1 means that ``point`` is faster. The ratio is None if a run of either point is
    not valid. Its interval covers the choice of requests, but not differences between passes.
    """
    if not (point.valid and reference.valid):
        return None, []
    over, under = ([run.records for run in p.runs] for p in (point, reference))
    by_pass = [
        estimate_ratio([o], [u], latency, level)
        for o, u in zip(over, under, strict=False)
    ]
    ratio = estimate_ratio(over, under, latency, level)
    return ratio, [passed.value for passed in by_pass if passed]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The runs of all arms in order of time, the objective, and why the experiment ended early."""

    runs: Sequence[Run]
    slo: SendingOptions
    broken: str = ""

    @cached_property
    def points(self) -> list[Point]:
        """Points by arm and load, sorted by load; closed loops come before open ones."""
        groups: dict[tuple[str, Load], list[Run]] = {}
        for run in self.runs:
            groups.setdefault((run.arm, run.result.options.load), []).append(run)
        points = [
            Point(arm, load, tuple(passes)) for (arm, load), passes in groups.items()
        ]
        return sorted(points, key=lambda p: (p.load.rate or 0.0, p.load.users or 0))

    @property
    def arms(self) -> list[str]:
        """Names of all arms, the reference first."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @cached_property
    def answer(self) -> tuple[str, Tone]:
        """One sentence on the whole experiment, which compares the last arm with the first.

        It is about the highest load that all arms were sent and, if there is one, at which no arm
        was saturated. Beyond saturation the queue grows for as long as a run lasts, so its
        latencies mean nothing.
        """
        by_load = [
            list(points) for _, points in groupby(self.points, lambda point: point.load)
        ]
        valid = [
            shared
            for shared in by_load
            if len(shared) == len(self.arms) and all(point.valid for point in shared)
        ]
        if not valid:
            return (
                "No valid result at a load that all arms have: nothing can be compared.",
                "bad",
            )
        below = [
            shared for shared in valid if not any(p.past_saturation for p in shared)
        ]
        highest = (below or valid)[-1]
        reference = highest[0]
        candidate = highest[-1]
        ratio, _ = _compare_points(candidate, reference, "TTFT", 50)
        tone: Tone = "open"
        title = reference.load.title
        if ratio is None or candidate is reference:
            rate = reference.summary.request_rate
            goodput = reference.summary.goodput
            met = f"{format_estimate(goodput, 100)} %" if goodput else "none"
            sentence = (
                f"{reference.arm} answered {rate:.2f} requests/s ({title}); {met} of the requests "
                f"met the objective ({self.slo.describe_objective()})"
            )
        else:
            sentence = (
                f"At {title}, the median time to the first token of {candidate.arm} is "
                f"{format_estimate(ratio, 100, 0)} % of that of {reference.arm}"
            )
            if ratio.low <= 1 <= ratio.high:
                sentence += ": no difference is shown"
            else:
                tone = "good" if ratio.high < 1 else "bad"
        # The sentence opens with a warning if a load has too few requests for its percentiles.
        few = describe_few(
            min(p.summary.requests for p in self.points if p.valid), " at a load"
        )
        if few:
            return f"{few[0].upper()}{few[1:]}. {sentence}.", "open"
        return f"{sentence}.", tone

    def list_limits(self) -> Iterator[str]:
        """How far the answer can be trusted."""
        if self.broken:
            yield f"The experiment ended early: {self.broken}"
        total = f"of {len(self.runs)} runs"
        results = [run.result for run in self.runs]
        disturbed = [result.accepted[0] for result in results if result.accepted]
        if disturbed:
            yield (
                f"Other work disturbed {len(disturbed)} {total}, which --shared accepts. "
                f"The first: {disturbed[0]}."
            )
        reasons = [result.reasons[0] for result in results if result.reasons]
        if reasons:
            yield f"{len(reasons)} {total} are not valid. The first reason: {reasons[0]}."

    def write(self, folder: Path, settings: Section) -> None:
        """Write ``report.html``; ``settings``, its last section, says how it was measured."""
        sentence, tone = self.answer
        valid = sum(run.result.valid for run in self.runs)
        document = Document(
            title=f"Load test: {', '.join(self.arms)}",
            answer=sentence,
            tone=tone,
            warnings=[*self.list_limits()],
            facts=[
                f"{valid} of {len(self.runs)} runs are valid",
                f"{sum(run.result.summary.requests for run in self.runs):,} requests counted",
                f"objective: {self.slo.describe_objective()}",
                *dict.fromkeys(CACHES[run.result.workload.cache] for run in self.runs),
            ],
            sections=[
                self.draw_chart(),
                *self.build_ratios(),
                self.build_figures(),
                self.build_runs(),
                settings,
            ],
        )
        (folder / REPORT).write_text(document.render_html())

    def draw_chart(self) -> Section:
        """Median TTFT over the achieved rate; open loops are dashed."""
        series = []
        for colour, arm in enumerate(self.arms):
            points = [point for point in self.points if point.arm == arm]
            # Sorted by load: beyond saturation throughput may fall, so the line may turn back.
            for kind in ("closed", "open"):
                marks = []
                for point in points:
                    median = point.summary.percentile("TTFT", 50)
                    if median is None or (point.load.rate is None) != (
                        kind == "closed"
                    ):
                        continue
                    value, low, high = (
                        1000 * end for end in dataclasses.astuple(median)
                    )
                    tip = f"{arm}, {point.load.title}" + (
                        "" if point.valid else ", not valid"
                    )
                    rate = point.summary.request_rate
                    marks.append(Mark(rate, value, tip, low, high, not point.valid))
                if marks:
                    name = f"{arm}, {kind} loop"
                    series.append(
                        Series(name, marks, dashed=kind == "open", colour=colour)
                    )
        objective = self.slo.slo_ttft
        limit = {f"objective {objective:g} ms": objective} if objective else {}
        titles = ("Latency over throughput", "achieved, requests/s", "median TTFT, ms")
        chart = Chart(*titles, series, limit)
        text = "Bars: 95 % intervals; hollow: not valid. Point at a mark for its load."
        return Section("Latency and throughput", [text], [chart])

    def build_ratios(self) -> Iterator[Section]:
        """Tables of ratios of every arm to the first, at every load that both were sent."""
        against = self.arms[0]
        references = {
            point.load: point for point in self.points if point.arm == against
        }
        rows: list[Row] = []
        for point in self.points:
            if point.arm == against or point.load not in references:
                continue
            cells = [Cell(point.load.title), Cell(point.arm)]
            for latency, level in _COMPARED:
                ratio, by_pass = _compare_points(
                    point, references[point.load], latency, level
                )
                if ratio is None:
                    cells.append(Cell("not valid"))
                    continue
                tone: CellTone = ""
                if ratio.high < 1:
                    tone = "good"
                elif ratio.low > 1:
                    tone = "bad"
                passes = ", ".join(f"{value:.3f}" for value in by_pass)
                under = f"{ratio.low:.3f}–{ratio.high:.3f}; passes {passes}"
                cells.append(Cell(f"{ratio.value:.3f}", under, tone=tone))
            rows.append(cells)
        text = (
            f"Ratios to {against} on the same requests, with 95 % intervals, then those of each "
            "pass: below 1 is less. An interval does not cover differences between passes, so "
            "compare them."
        )
        head = ["load", "arm", *(f"{latency} p{level}" for latency, level in _COMPARED)]
        if rows:
            yield Section(
                f"Against {against}", [text], tables=[Table("", head, rows, "ll")]
            )

    def build_figures(self) -> Section:
        """Table of counts, latencies, rates and goodput; it has TTFAT only if a model thinks."""

        def describe(figure: Estimate | None, unit: float, few: str = "") -> str:
            """Format a figure, and its interval for the table to show below it."""
            if figure is None:
                return "no answer"
            return (
                format_estimate(figure, unit, 0 if unit * figure.value > 100 else 1)
                + few
            )

        thinks = any(point.summary.thinks for point in self.points)
        figures = [
            (name, level) for name, level in _TABULATED if thinks or name != "TTFAT"
        ]
        rows: list[Row] = []
        for point in self.points:
            summary = point.summary
            latencies = [
                describe(summary.percentile(name, level), 1000, summary.mark_few(level))
                for name, level in figures
            ]
            arm = point.arm if point.valid else Cell(point.arm, "not valid", tone="bad")
            due = "–"
            if point.load.rate is not None:
                due = f"{summary.offered_rate or point.load.rate:.2f}"
            goodput = describe(summary.goodput, 100)
            counts = [f"{summary.requests}", f"{summary.prompt_tokens:.1f}"]
            rates = [due, f"{summary.request_rate:.2f}", goodput]
            rows.append([point.load.title, arm, *counts, *latencies, *rates])
        latency_heads = (f"{name} p{level}, ms" for name, level in figures)
        head = [
            "load",
            "arm",
            "requests",
            "prompt tokens",
            *latency_heads,
            "offered/s",
            "achieved/s",
            "goodput, %",
        ]
        text = (
            "All passes together; in an open loop from the scheduled time, which a closed loop "
            "does not have. TTFAT: to the first token after thoughts. TPOT: by the server's count "
            "of tokens. ITL: gaps between deltas, which may contain more than one token. †: too "
            "few requests for this percentile."
        )
        return Section(
            "Rates and latencies", [text], tables=[Table("", head, rows, "ll")]
        )

    def build_runs(self) -> Section:
        """Table of the runs with their verdicts, and links to their files."""
        rows: list[Row] = [
            [
                f"{run.number + 1}",
                run.arm,
                run.result.options.load.title,
                Cell(run.result.verdict, tone="" if run.result.valid else "bad"),
                run.result.environment["load average"],
                Cell(
                    f"{len(run.records)} requests",
                    link=quote(f"{run.folder}/{RECORDS}"),
                ),
                Cell("run.json", link=quote(f"{run.folder}/{RESULT}")),
            ]
            for run in self.runs
        ]
        head = [
            "pass",
            "arm",
            "load",
            "verdict",
            "load average before",
            "records",
            "figures",
        ]
        table = Table("", head, rows, "l" * len(head))
        return Section("Every run, in order of time", tables=[table])
