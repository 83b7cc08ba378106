"""Comparison of arms: paired ratios of percentiles, knee and highest rates, the answer in words.

Every figure is of all passes of one arm at one load, with the passes of a request drawn together.
Runs that are not valid count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from benchmarks.common import StrictModel
from benchmarks.common.client import Record
from benchmarks.common.report import format_estimate
from benchmarks.load.result import (
    ENOUGH,
    KEPT_UP,
    RECORDS,
    Distribution,
    Result,
    distribution,
    ratio,
    share,
)
from benchmarks.load.schedule import Load, Slo
from vllm_autoprune.report import Tone
from vllm_autoprune.statistics import Estimate

LATENCIES: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "TTFT": lambda record: (record.ttft,),
    "ITL": lambda record: record.gaps,
    "TPOT": lambda record: () if record.tpot is None else (record.tpot,),
    "E2E": lambda record: (record.e2e,),
}
"""The seconds that one answered request contributes to each kind of latency."""
FIGURES = {
    "TTFT p50": ("TTFT", 50), "TTFT p99": ("TTFT", 99), "TPOT p50": ("TPOT", 50),
    "E2E p50": ("E2E", 50),
}  # fmt: skip
"""What arms are compared by."""
GOOD_SHARE = 0.99
"""Share of requests that have to meet the objective."""
KNEE = 2.0
"""Beyond the knee, the median TTFT exceeds that of the lowest rate by this factor."""


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

    @property
    def counted(self) -> list[Record]:
        """Requests that count and were answered."""
        return [record for record in self.records if record.phase == "measured" and record.ok]


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

    @property
    def requests(self) -> int:
        """Requests that count, over all passes."""
        return sum(run.result.summary.requests for run in self.runs)

    def by_request(self, latency: str) -> dict[int, list[float]]:
        """Seconds of all passes by the index of their request."""
        by_index: dict[int, list[float]] = {}
        for run in self.runs:
            for record in run.counted:
                by_index.setdefault(record.index, []).extend(LATENCIES[latency](record))
        return by_index

    def distribution(self, latency: str) -> Distribution | None:
        """Percentiles over all passes."""
        by_index = self.by_request(latency)
        return distribution([by_index[index] for index in sorted(by_index)])

    def median(self, latency: str) -> float:
        """Seconds; infinite where nothing was answered."""
        times = self.distribution(latency)
        return times.at(50).value if times else float("inf")

    @property
    def goodput(self) -> Estimate | None:
        """Share of requests that met the objective."""
        return share(
            [
                run.result.slo.good(record)
                for run in self.runs
                for record in run.records
                if record.phase == "measured"
            ]
        )

    def mean(self, figure: Callable[[Result], float | None]) -> float | None:
        """Mean of a figure over the passes that have it."""
        known = [value for run in self.runs if (value := figure(run.result)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def completed(self) -> float:
        """Requests answered a second."""
        return self.mean(lambda result: result.summary.request_rate) or 0.0

    def answered(self, idle: float) -> float:
        """The same, without the ``idle`` seconds that one answer takes on an idle server.

        Otherwise the last answer alone would make a short run look slow.
        """

        def rate(result: Result) -> float | None:
            busy = result.summary.seconds - idle
            return (result.summary.requests - result.summary.failed) / busy if busy > 0 else None

        return self.mean(rate) or 0.0

    @property
    def offered(self) -> float | None:
        """Requests due a second, by the schedule."""
        return self.mean(lambda result: result.summary.offered_rate)

    @property
    def good(self) -> float:
        """Requests a second that met the objective."""
        return self.mean(lambda result: result.summary.good_rate) or 0.0

    @property
    def past_saturation(self) -> bool:
        """Whether most requests miss the objective or a run ended early: no higher rate is sent."""
        failed = any(run.result.facts.early for run in self.runs)
        return failed or self.goodput is None or self.goodput.value < 0.5


def group_runs(runs: Sequence[Run]) -> list[Point]:
    """Points by arm and load, in the order in which they first occur."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.result.load.label), []).append(run)
    return [Point(arm, passes[0].result.load, tuple(passes)) for (arm, _), passes in groups.items()]


def open_points(points: Sequence[Point]) -> list[Point]:
    """Those of open loops, by rate."""
    return sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)


class Comparison(StrictModel):
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
    comparisons = []
    for point, reference in _pair_points(points):
        both = point.valid and reference.valid
        passes = list(zip(point.runs, reference.runs, strict=False))
        for name in FIGURES:
            alone = [_ratio([mine], [other], name) for mine, other in passes] if both else []
            comparisons.append(
                Comparison(
                    load=point.load,
                    arm=point.arm,
                    against=reference.arm,
                    figure=name,
                    ratio=_ratio(point.runs, reference.runs, name) if both else None,
                    by_pass=tuple(each.value for each in alone if each),
                )
            )
    return comparisons


def _pair_points(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Each point of another arm with that of the first arm at the same load."""
    reference = {point.load: point for point in points if point.arm == points[0].arm}
    return [
        (point, reference[point.load])
        for point in points
        if point.arm != points[0].arm and point.load in reference
    ]


def _ratio(over: Sequence[Run], under: Sequence[Run], figure: str) -> Estimate | None:
    """Over the requests that both answered."""
    latency, level = FIGURES[figure]
    mine, other = (
        Point("", runs[0].result.load, tuple(runs)).by_request(latency) for runs in (over, under)
    )
    both = sorted(mine.keys() & other.keys())
    return ratio([mine[i] for i in both], [other[i] for i in both], level) if both else None


@dataclass(frozen=True)
class Edge:
    """The rate at which a condition ceases to hold, between two measured rates."""

    holds: float | None
    """The highest valid rate up to which it holds; None: at none."""
    fails: float | None
    """The lowest valid rate at which it does not hold; None: at none."""
    gap: bool
    """Whether a rate between the two was measured, but is not valid."""

    @classmethod
    def find(cls, points: Sequence[Point], holds: Callable[[Point], bool]) -> Edge:
        """From points of rising rates; a rate counts only if all lower valid ones hold."""
        rates = [(point.load.rate or 0.0, point) for point in points]
        fails = next((rate for rate, point in rates if point.valid and not holds(point)), None)
        below = [(rate, point) for rate, point in rates if fails is None or rate < fails]
        highest = max((rate for rate, point in below if point.valid), default=None)
        gap = any(not p.valid and (highest is None or rate > highest) for rate, p in below)
        return cls(highest, fails, gap)

    def __str__(self) -> str:
        if self.holds is None:
            return "not known" if self.fails is None else f"below {self.fails:g}"
        if self.fails is None:
            return f"at least {self.holds:g}"
        return f"{self.holds:g} to {self.fails:g}" if self.gap else f"{self.holds:g}"


@dataclass(frozen=True)
class Sweep:
    """One arm over all measured rates."""

    knee: Edge
    highest: Edge
    """The highest rate that the server keeps up with and at which p99 TTFT and goodput suffice."""
    saturated: bool
    """Whether the server did not keep up with some rate; if not, higher rates are needed."""


def build_sweep(points: Sequence[Point], slo: Slo) -> Sweep:
    """From the open-loop points of one arm."""
    ordered = open_points(points)
    lowest = next((p for p in ordered if p.valid), None)
    knee = KNEE * lowest.median("TTFT") if lowest else 0.0
    idle = lowest.median("E2E") if lowest else 0.0

    def keeps_up(point: Point) -> bool:
        return point.answered(idle) >= KEPT_UP * (point.offered or 0.0)

    def meets(point: Point) -> bool:
        times, goodput = point.distribution("TTFT"), point.goodput
        if times is None or goodput is None or not keeps_up(point):
            return False
        late = slo.ttft is not None and times.at(99).value > slo.ttft
        return not late and goodput.value >= GOOD_SHARE

    return Sweep(
        knee=Edge.find(ordered, lambda p: keeps_up(p) and p.median("TTFT") <= knee),
        highest=Edge.find(ordered, meets),
        saturated=any(p.valid and not keeps_up(p) for p in ordered),
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
    least, few = min((point.requests for point in points if point.valid), default=0), ""
    if least < ENOUGH[50]:
        few = f"Too few requests for a verdict ({least} at a load, {ENOUGH[50]} needed): "
    elif least < ENOUGH[99]:
        few = f"Too few requests for p99 ({least} at a load, {ENOUGH[99]} needed): "
    arms = list(dict.fromkeys(point.arm for point in points))
    at_load = [p for arm in arms for p in points if (p.arm, p.load) == (arm, load)]
    medians = [c for c in compare_arms(at_load) if (c.figure, c.arm) == ("TTFT p50", arms[-1])]
    if not medians:
        point = at_load[0]
        good = f"{format_estimate(point.goodput, 100)} %" if point.goodput else "none"
        sentence = (
            f"{point.arm} answered {point.completed:.2f} requests/s ({load.describe()}); {good} of "
            f"the requests met the objective ({slo.describe()})."
        )
        return Answer(few + sentence, "open", limits)
    median = medians[0].ratio
    if median is None:
        return Answer("No valid result at a load that all arms have in common.", "bad", limits)
    tone: Tone = "good" if median.high < 1 else "bad" if median.low > 1 else "open"
    if median.low <= 1 <= median.high:
        sentence = (
            f"At {load.title}, no difference is shown between the median times to first token of "
            f"{arms[-1]} and {arms[0]} (ratio {format_estimate(median, 1, 2)})"
        )
    else:
        word = "less" if median.high < 1 else "more"
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
