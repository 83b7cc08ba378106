"""Comparison of arms: paired ratios of percentiles, knee and highest rates, the answer in words.

Every figure is of all passes of one arm at one load, with the passes of a request drawn together.
Runs that are not valid count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from urllib.parse import quote

from benchmarks.common.client import Record
from benchmarks.common.report import format_estimate
from benchmarks.load.result import (
    KEPT_UP,
    LATENCIES,
    RECORDS,
    Result,
    Summary,
    ratio,
    say_too_few,
    summarize,
    values_by_request,
)
from benchmarks.load.settings import Load, Slo
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Tone
from vllm_autoprune.statistics import Estimate

FIGURES = {
    "TTFT p50": ("TTFT", 50), "TTFT p99": ("TTFT", 99), "TPOT p50": ("TPOT", 50),
    "E2E p50": ("E2E", 50),
}  # fmt: skip
"""What arms are compared by."""
KNEE = 2.0
"""Beyond the knee, the median TTFT exceeds that of the lowest rate by this factor."""
_GOOD_SHARE = 0.99
"""Share of requests that have to meet the objective."""


@dataclass(frozen=True)
class Run:
    """One pass of one arm at one load."""

    arm: str
    number: int
    result: Result
    records: tuple[Record, ...]
    folder: str
    """Relative to the report."""

    def link(self, name: str = RECORDS) -> str:
        """Link from the report to a file of the run, such as the one that has every request."""
        return quote(f"{self.folder}/{name}")


@dataclass(frozen=True)
class Point:
    """All passes of one arm at one load."""

    arm: str
    load: Load
    runs: tuple[Run, ...]

    @property
    def valid(self) -> bool:
        """Whether every pass is valid."""
        return all(run.result.verdict.valid for run in self.runs)

    @cached_property
    def summary(self) -> Summary:
        """Figures over all passes."""
        return summarize([run.records for run in self.runs], self.runs[0].result.slo)

    def median(self, latency: str) -> float:
        """Seconds; infinite where nothing was answered."""
        times = self.summary.latency(latency)
        return times.at(50).value if times else float("inf")

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
        early = any(run.result.facts.early for run in self.runs)
        return early or goodput is None or goodput.value < 0.5


def group_runs(runs: Sequence[Run]) -> list[Point]:
    """Points by arm and load, in the order in which they first occur."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.result.load.label), []).append(run)
    return [Point(arm, passes[0].result.load, tuple(passes)) for (arm, _), passes in groups.items()]


def open_points(points: Sequence[Point]) -> list[Point]:
    """Those of open loops, by rate."""
    return sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)


class Comparison(FrozenModel):
    """One arm against the first at one load."""

    load: Load
    arm: str
    against: str
    figure: str
    ratio: Estimate | None
    """Below 1: less than the reference; None where a run of either is not valid."""
    by_pass: tuple[float, ...] = ()
    """The ratio of each pass alone: the interval does not cover differences between passes."""


def compare_arms(points: Sequence[Point]) -> list[Comparison]:
    """Every arm against the first one, at every load that both have."""
    reference = {point.load: point for point in points if point.arm == points[0].arm}
    comparisons = []
    for point in points:
        other = reference.get(point.load)
        if other is None or point.arm == other.arm:
            continue
        both = point.valid and other.valid
        for name in FIGURES:
            pairs = zip(point.runs, other.runs, strict=False) if both else ()
            by_pass = [_ratio([mine], [theirs], name) for mine, theirs in pairs]
            comparisons.append(
                Comparison(
                    load=point.load,
                    arm=point.arm,
                    against=other.arm,
                    figure=name,
                    ratio=_ratio(point.runs, other.runs, name) if both else None,
                    by_pass=tuple(each.value for each in by_pass if each),
                )
            )
    return comparisons


def _ratio(over: Sequence[Run], under: Sequence[Run], figure: str) -> Estimate | None:
    latency, level = FIGURES[figure]
    upper, lower = (
        values_by_request([run.records for run in runs], LATENCIES[latency])
        for runs in (over, under)
    )
    return ratio(upper, lower, level)


class Sweep(NamedTuple):
    """One arm over all measured rates, requests/s as text."""

    knee: str
    highest: str
    """The highest rate that the server keeps up with and at which p99 TTFT and goodput suffice."""
    saturated: bool
    """Whether the server did not keep up with some rate; if not, higher rates are needed."""


def _find_edge(points: Sequence[Point], holds: Callable[[Point], bool]) -> str:
    """The rate up to which a condition holds, of points of rising rates.

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


def build_sweep(points: Sequence[Point], slo: Slo) -> Sweep:
    """From the open-loop points of one arm."""
    ordered = open_points(points)
    lowest = next((p for p in ordered if p.valid), None)
    knee = KNEE * lowest.median("TTFT") if lowest else 0.0
    idle = lowest.median("E2E") if lowest else 0.0

    def meets(point: Point) -> bool:
        times, goodput = point.summary.ttft, point.summary.goodput
        if times is None or goodput is None or not point.keeps_up(idle):
            return False
        late = slo.ttft is not None and times.at(99).value > slo.ttft
        return not late and goodput.value >= _GOOD_SHARE

    return Sweep(
        knee=_find_edge(ordered, lambda p: p.keeps_up(idle) and p.median("TTFT") <= knee),
        highest=_find_edge(ordered, meets),
        saturated=any(p.valid and not p.keeps_up(idle) for p in ordered),
    )


def _choose_common_load(points: Sequence[Point]) -> Load | None:
    """The highest load that every arm has, if possible valid and below saturation for all.

    Beyond saturation a queue grows as long as a run lasts, so that its latencies mean nothing.
    """
    by_load: dict[Load, list[Point]] = {}
    for point in points:
        by_load.setdefault(point.load, []).append(point)
    arms = {point.arm for point in points}
    common = {load: each for load, each in by_load.items() if {p.arm for p in each} == arms}
    valid = [load for load, each in common.items() if all(p.valid for p in each)]
    below = [load for load in valid if not any(p.past_saturation for p in common[load])]
    loads = below or valid or list(common)
    return max(loads, key=lambda load: (load.rate or 0, load.users or 0), default=None)


@dataclass(frozen=True)
class Answer:
    """One sentence on the whole experiment; ``limits`` say how far it can be trusted."""

    sentence: str
    tone: Tone
    limits: tuple[str, ...] = ()


def answer_question(points: Sequence[Point], slo: Slo, broken: str | None) -> Answer:
    """The last arm against the first, at the highest load that is valid for both."""
    limits = tuple(_list_limits(points, broken))
    load = _choose_common_load(points)
    if load is None or not any(point.valid for point in points):
        return Answer("No valid result: nothing can be compared.", "bad", limits)
    # A warning opens the sentence, where a load has too few requests for its percentiles.
    fewest = min((point.summary.requests for point in points if point.valid), default=0)
    few = say_too_few(fewest, " at a load")
    few = f"{few[0].upper()}{few[1:]}. " if few else ""
    arms = list(dict.fromkeys(point.arm for point in points))
    at_load = [p for arm in arms for p in points if (p.arm, p.load) == (arm, load)]
    medians = [c for c in compare_arms(at_load) if (c.figure, c.arm) == ("TTFT p50", arms[-1])]
    if not medians:
        point = at_load[0]
        goodput = point.summary.goodput
        sentence = (
            f"{point.arm} answered {point.summary.request_rate:.2f} requests/s "
            f"({load.describe()}); {format_estimate(goodput, 100) + ' %' if goodput else 'none'} "
            f"of the requests met the objective ({slo.describe()})."
        )
        return Answer(few + sentence, "open", limits)
    median = medians[0].ratio
    if median is None:
        return Answer("No valid result at a load that all arms have in common.", "bad", limits)
    tone: Tone = "good" if median.high < 1 else "bad" if median.low > 1 else "open"
    if tone == "open":
        sentence = (
            f"At {load.title}, no difference is shown between the median times to first token of "
            f"{arms[-1]} and {arms[0]} (ratio {format_estimate(median, 1, 2)})"
        )
    else:
        word = "less" if tone == "good" else "more"
        low, high = sorted(100 * abs(end - 1) for end in (median.low, median.high))
        sentence = (
            f"At {load.title}, {arms[-1]} needs {100 * abs(median.value - 1):.0f} % {word} time to "
            f"the first token than {arms[0]} (median, 95 %: {low:.0f} to {high:.0f} %)"
        )
    by_arm = [open_points([p for p in points if p.arm == arm]) for arm in (arms[-1], arms[0])]
    if all(by_arm):
        mine, other = (build_sweep(swept, slo).highest for swept in by_arm)
        sentence += f", and it serves {mine} requests/s within the objective against {other}"
    return Answer(f"{few}{sentence}.", "open" if few else tone, limits)


def _list_limits(points: Sequence[Point], broken: str | None) -> Iterator[str]:
    if broken:
        yield f"The experiment ended early: {broken}"
    runs = [run for point in points for run in point.runs]
    invalid = [run for run in runs if not run.result.verdict.valid]
    if invalid:
        yield (
            f"{len(invalid)} of {len(runs)} runs are not valid. They are hollow in the charts, and "
            "used for no ratio and no rate. The first reason: "
            f"{invalid[0].result.verdict.reasons[0]}."
        )
