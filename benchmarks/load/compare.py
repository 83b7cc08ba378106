"""Comparison of arms: paired ratios of percentiles, knee and highest rates, the answer in words.

Every figure is of all passes of one arm at one load, with the passes of a request drawn together.
Runs that are not valid count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from benchmarks.common.client import Record
from benchmarks.common.report import format_estimate
from benchmarks.load.result import (
    KEPT_UP,
    Result,
    Summary,
    describe_few,
    estimate_ratio,
    summarize,
)
from benchmarks.load.settings import Load, SendingOptions
from vllm_autoprune.report import Tone
from vllm_autoprune.statistics import Estimate

FIGURES = (("TTFT", 50), ("TTFT", 99), ("TPOT", 50), ("E2E", 50))
"""What arms are compared by."""
_KNEE = 2.0
"""Beyond the knee, the median TTFT exceeds that of the lowest rate by this factor."""
_GOOD_SHARE = 0.99
"""Share of requests that have to meet the objective."""


class Run(NamedTuple):
    """One pass of one arm at one load."""

    arm: str
    number: int
    folder: str
    """Relative to the report."""
    result: Result
    records: Sequence[Record]


@dataclass(frozen=True)
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
        """Figures over all passes."""
        return summarize([run.records for run in self.runs], self.runs[0].result.options)

    def median(self, latency: str) -> float:
        """Seconds; infinite where nothing was answered."""
        estimate = self.summary.percentile(latency, 50)
        return estimate.value if estimate else float("inf")

    def keeps_up(self, idle: float) -> bool:
        """Whether the server completes the rate that is offered.

        Without the ``idle`` seconds that one answer takes on an idle server: otherwise the last
        answer alone would make a short run look slow.
        """
        summaries = [run.result.summary for run in self.runs]
        busy = [(s.requests - s.failed, s.seconds - idle) for s in summaries if s.seconds > idle]
        answered = sum(count / seconds for count, seconds in busy) / max(len(busy), 1)
        return answered >= KEPT_UP * (self.summary.offered_rate or 0.0)

    @property
    def past_saturation(self) -> bool:
        """Whether most requests miss the objective or a run ended early: no higher rate is sent."""
        goodput = self.summary.goodput
        early = any(run.result.early for run in self.runs)
        return early or goodput is None or goodput.value < 0.5


def group_runs(runs: Sequence[Run]) -> list[Point]:
    """Points by arm and load: closed loops before open ones, each by load."""
    groups: dict[tuple[str, Load], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.result.load), []).append(run)
    points = [Point(arm, load, tuple(passes)) for (arm, load), passes in groups.items()]
    return sorted(points, key=lambda p: (p.load.rate or 0.0, p.load.users or 0))


def group_by_arm(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each arm, in the order of arms."""
    arms: dict[str, list[Point]] = {}
    for point in points:
        arms.setdefault(point.arm, []).append(point)
    return arms


def select_open(points: Sequence[Point]) -> list[Point]:
    """Those of open loops."""
    return [point for point in points if point.load.rate is not None]


class Comparison(NamedTuple):
    """One arm against the first at one load."""

    load: Load
    arm: str
    against: str
    figure: str
    ratio: Estimate | None
    """Below 1: less than the reference; None where a run of either is not valid."""
    by_pass: tuple[float, ...]
    """The ratio of each pass alone: the interval does not cover differences between passes."""


def compare_arms(points: Sequence[Point]) -> list[Comparison]:
    """Every arm against the first one, at every load that both have."""
    references = {point.load: point for point in points if point.arm == points[0].arm}
    comparisons = []
    for point in points:
        reference = references.get(point.load)
        if reference is None or point is reference:
            continue
        valid = point.valid and reference.valid
        over, under = ([r.records for r in p.runs] if valid else [] for p in (point, reference))
        for latency, level in FIGURES:
            pairs = zip(over, under, strict=False)
            by_pass = [estimate_ratio([o], [u], latency, level) for o, u in pairs]
            ratio = estimate_ratio(over, under, latency, level)
            values = tuple(ratio.value for ratio in by_pass if ratio)
            figure = f"{latency} p{level}"
            comparisons.append(
                Comparison(point.load, point.arm, reference.arm, figure, ratio, values)
            )
    return comparisons


def find_limits(points: Sequence[Point], slo: SendingOptions) -> tuple[str, str, bool]:
    """Of an arm's open-loop points, by rising rate: knee, highest rate, and whether it saturated.

    The highest rate is one that the server keeps up with and at which p99 TTFT and goodput suffice.
    """
    lowest = next((point for point in points if point.valid), None)
    knee = _KNEE * lowest.median("TTFT") if lowest else 0.0
    idle = lowest.median("E2E") if lowest else 0.0

    def meets(point: Point) -> bool:
        p99, goodput = point.summary.percentile("TTFT", 99), point.summary.goodput
        if p99 is None or goodput is None or not point.keeps_up(idle):
            return False
        late = slo.slo_ttft and 1000 * p99.value > slo.slo_ttft
        return not late and goodput.value >= _GOOD_SHARE

    def find_edge(holds: Callable[[Point], bool]) -> str:
        """The rate up to which a condition holds.

        A rate counts only if all lower valid ones hold. Two rates where a run between is not valid.
        """
        rates = [(point.load.rate or 0.0, point) for point in points]
        fails = next((rate for rate, point in rates if point.valid and not holds(point)), None)
        below = [(rate, point) for rate, point in rates if fails is None or rate < fails]
        highest = max((rate for rate, point in below if point.valid), default=None)
        if highest is None:
            return "not known" if fails is None else f"below {fails:g}"
        if fails is None:
            return f"at least {highest:g}"
        gap = any(not point.valid and rate > highest for rate, point in below)
        return f"{highest:g} to {fails:g}" if gap else f"{highest:g}"

    return (
        find_edge(lambda p: p.keeps_up(idle) and p.median("TTFT") <= knee),
        find_edge(meets),
        any(p.valid and not p.keeps_up(idle) for p in points),
    )


def answer_question(points: Sequence[Point], slo: SendingOptions) -> tuple[str, Tone]:
    """One sentence on the whole experiment: the last arm against the first.

    At the highest load that all arms have, if possible below saturation for all: beyond it a queue
    grows as long as a run lasts, so that its latencies mean nothing.
    """
    arms = group_by_arm(points)
    by_load: dict[Load, list[Point]] = {}
    for point in points:
        by_load.setdefault(point.load, []).append(point)
    common = [shared for shared in by_load.values() if len(shared) == len(arms)]
    valid = [shared for shared in common if all(p.valid for p in shared)]
    below = [shared for shared in valid if not any(p.past_saturation for p in shared)]
    if not valid:
        return "No valid result at a load that all arms have: nothing can be compared.", "bad"
    highest = (below or valid)[-1]
    reference, candidate = highest[0], highest[-1]
    # A warning opens the sentence, where a load has too few requests for its percentiles.
    few = describe_few(min(p.summary.requests for p in points if p.valid), " at a load")
    few = f"{few[0].upper()}{few[1:]}. " if few else ""
    tone: Tone = "open"
    title = reference.load.title
    median = compare_arms([reference, candidate])[0].ratio if candidate is not reference else None
    if median is None:
        goodput = reference.summary.goodput
        sentence = (
            f"{reference.arm} answered {reference.summary.request_rate:.2f} requests/s ({title}); "
            f"{format_estimate(goodput, 100) + ' %' if goodput else 'none'} of the requests met "
            f"the objective ({slo.describe_objective()})"
        )
    elif median.low <= 1 <= median.high:
        sentence = (
            f"At {title}, no difference is shown between the median times to first token of "
            f"{candidate.arm} and {reference.arm} (ratio {format_estimate(median, 1, 2)})"
        )
    else:
        tone, word = ("good", "less") if median.high < 1 else ("bad", "more")
        low, high = sorted(100 * abs(end - 1) for end in (median.low, median.high))
        sentence = (
            f"At {title}, {candidate.arm} needs {100 * abs(median.value - 1):.0f} % {word} time to "
            f"the first token than {reference.arm} (median, 95 %: {low:.0f} to {high:.0f} %)"
        )
    swept = [select_open(arms[point.arm]) for point in (candidate, reference)]
    if median and all(swept):
        rate, against = (find_limits(points, slo)[1] for points in swept)
        sentence += f", and it serves {rate} requests/s within the objective against {against}"
    return f"{few}{sentence}.", "open" if few else tone


def list_limits(points: Sequence[Point], broken: str | None) -> Iterator[str]:
    """How far the answer can be trusted."""
    if broken:
        yield f"The experiment ended early: {broken}"
    runs = [run for point in points for run in point.runs]
    invalid = [run for run in runs if not run.result.valid]
    disturbed = [run.result.accepted[0] for run in runs if run.result.accepted]
    if disturbed:
        yield (
            f"Other work disturbed {len(disturbed)} of {len(runs)} runs, which --shared accepts. "
            f"The first: {disturbed[0]}."
        )
    if invalid:
        yield (
            f"{len(invalid)} of {len(runs)} runs are not valid. They are hollow in the charts, and "
            f"used for no ratio and no rate. The first reason: {invalid[0].result.reasons[0]}."
        )
