"""A sweep of request rates: its knee, and the highest rate that meets the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.common import StrictModel
from benchmarks.load.points import Point, Values, e2e, ttft
from benchmarks.load.result import KEPT_UP
from benchmarks.load.schedule import Slo

GOOD_SHARE = 0.99
"""Share of requests that have to meet the objective."""
KNEE = 2.0
"""Beyond the knee, the median TTFT exceeds that of the lowest rate by this factor."""
STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep, as multiples of the first arm's capacity in a closed loop."""


class Edge(StrictModel):
    """The rate at which a condition ceases to hold, between two measured rates.

    Runs that are not valid count as unknown.
    """

    holds: float | None
    """The highest valid rate up to which it holds; None: at none."""
    fails: float | None
    """The lowest valid rate at which it does not hold; None: at none."""
    gap: bool
    """Whether a rate between the two was measured, but is not valid."""

    def __str__(self) -> str:
        if self.holds is None:
            return "not known" if self.fails is None else f"below {self.fails:g}"
        if self.fails is None:
            return f"at least {self.holds:g}"
        return f"{self.holds:g} to {self.fails:g}" if self.gap else f"{self.holds:g}"


class Sweep(StrictModel):
    """One arm over all measured rates."""

    arm: str
    rates: tuple[float, ...]
    knee: Edge
    highest: Edge
    """The highest rate that the server keeps up with and at which p99 TTFT and goodput suffice."""
    surely: Edge
    """The same for the upper end of the interval of p99 TTFT."""
    saturated: bool
    """Whether the server did not keep up with some rate; if not, higher rates are needed."""


def choose_rates(capacity: float, steps: Sequence[float] = STEPS) -> tuple[float, ...]:
    """Rates around a capacity in requests/s, to three digits, rising."""
    return tuple(float(f"{capacity * step:.3g}") for step in steps)


def is_past_saturation(point: Point) -> bool:
    """Whether higher rates can be skipped: most requests miss the objective, or the run failed."""
    goodput = point.goodput
    failed = any(run.result.facts.early for run in point.runs)
    return failed or goodput is None or goodput.value < 0.5


def build_sweep(points: Sequence[Point], slo: Slo) -> Sweep:
    """From the open-loop points of one arm; a rate counts only if all lower valid ones hold."""
    ordered = sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)
    lowest = next((p for p in ordered if p.valid), None)
    bound = KNEE * _median(lowest, ttft) if lowest else 0.0
    idle = _median(lowest, e2e) if lowest else 0.0

    def keeps_up(point: Point) -> bool:
        return point.answered(idle) >= KEPT_UP * (point.offered or 0.0)

    def meets(point: Point, surely: bool) -> bool:
        return keeps_up(point) and _meets_objective(point, slo, surely)

    return Sweep(
        arm=ordered[0].arm if ordered else "",
        rates=tuple(p.load.rate for p in ordered if p.load.rate is not None),
        knee=_find_edge(ordered, lambda p: keeps_up(p) and _median(p, ttft) <= bound),
        highest=_find_edge(ordered, lambda p: meets(p, surely=False)),
        surely=_find_edge(ordered, lambda p: meets(p, surely=True)),
        saturated=any(p.valid and not keeps_up(p) for p in ordered),
    )


def _find_edge(ordered: Sequence[Point], holds: Callable[[Point], bool]) -> Edge:
    valid = [p for p in ordered if p.valid]
    broken = next((p.load.rate for p in valid if not holds(p)), None)
    below = [p.load.rate or 0.0 for p in valid if broken is None or (p.load.rate or 0.0) < broken]
    highest = max(below, default=None)
    between = (
        p
        for p in ordered
        if not p.valid
        and (highest is None or (p.load.rate or 0.0) > highest)
        and (broken is None or (p.load.rate or 0.0) < broken)
    )
    return Edge(holds=highest, fails=broken, gap=any(between))


def _median(point: Point, values: Values) -> float:
    times = point.distribution(values)
    return times.at(50).value if times else float("inf")


def _meets_objective(point: Point, slo: Slo, surely: bool) -> bool:
    times, goodput = point.distribution(ttft), point.goodput
    if times is None or goodput is None:
        return False
    late = times.at(99)
    first = slo.ttft is None or (late.high if surely else late.value) <= slo.ttft
    return first and goodput.value >= GOOD_SHARE
