"""What a sweep of rates shows: the knee, and the highest rate that keeps the promise.

Knows nothing about how the rates were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.load.load import Slo
from benchmarks.load.plain import Plain
from benchmarks.load.points import Point, Values, e2e, ttft
from benchmarks.load.verdict import KEPT_UP

GOOD_SHARE = 0.99
"""Share of requests that have to keep every promise."""
KNEE = 2.0
"""Past the knee, the median TTFT is more than so many times that of the lowest rate."""
STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep as shares of the capacity that a closed loop of the first arm shows."""


class Edge(Plain):
    """Where something ceases to hold, between two rates that were tried.

    A run that is not valid tells nothing about its rate, for or against.
    """

    holds: float | None
    """The highest valid rate up to which it holds; None where not even at the lowest."""
    fails: float | None
    """The lowest valid rate at which it does not; None where there is none above."""
    gap: bool
    """Whether a rate between the two was tried and is not valid: it may hold there or not."""

    def __str__(self) -> str:
        if self.holds is None:
            return "not known" if self.fails is None else f"below {self.fails:g}"
        if self.fails is None:
            return f"at least {self.holds:g}"
        return f"{self.holds:g} to {self.fails:g}" if self.gap else f"{self.holds:g}"


class Sweep(Plain):
    """One arm, over all rates that were tried."""

    arm: str
    rates: tuple[float, ...]
    knee: Edge
    highest: Edge
    """The highest rate that is kept up with, p99 TTFT and goodput kept."""
    surely: Edge
    """The same by the upper end of the p99 interval."""
    saturated: bool
    """Whether a rate was reached that the server did not keep up with: if not, go higher."""


def grid(capacity: float, steps: Sequence[float] = STEPS) -> tuple[float, ...]:
    """Rates around a capacity in requests/s, to three digits, rising."""
    return tuple(float(f"{capacity * step:.3g}") for step in steps)


def over(point: Point) -> bool:
    """Whether higher rates can be left out: most requests break a promise, or the run broke."""
    goodput = point.goodput
    broken = any(run.result.facts.early for run in point.runs)
    return broken or goodput is None or goodput.value < 0.5


def sweep(points: Sequence[Point], slo: Slo) -> Sweep:
    """Of the open-loop points of one arm. A rate counts only where all lower valid ones hold."""
    ordered = sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)
    lowest = next((p for p in ordered if p.valid), None)
    bound = KNEE * _median(lowest, ttft) if lowest else 0.0
    idle = _median(lowest, e2e) if lowest else 0.0

    def keeps_up(point: Point) -> bool:
        return point.answered(idle) >= KEPT_UP * (point.offered or 0.0)

    def keeps(point: Point, surely: bool) -> bool:
        return keeps_up(point) and _keeps(point, slo, surely)

    return Sweep(
        arm=ordered[0].arm if ordered else "",
        rates=tuple(p.load.rate for p in ordered if p.load.rate is not None),
        knee=_edge(ordered, lambda p: keeps_up(p) and _median(p, ttft) <= bound),
        highest=_edge(ordered, lambda p: keeps(p, surely=False)),
        surely=_edge(ordered, lambda p: keeps(p, surely=True)),
        saturated=any(p.valid and not keeps_up(p) for p in ordered),
    )


def _edge(ordered: Sequence[Point], holds: Callable[[Point], bool]) -> Edge:
    valid = [p for p in ordered if p.valid]
    broken = next((p.load.rate for p in valid if not holds(p)), None)
    below = [p.load.rate or 0.0 for p in valid if broken is None or (p.load.rate or 0.0) < broken]
    held = max(below, default=None)
    between = (
        p
        for p in ordered
        if not p.valid
        and (held is None or (p.load.rate or 0.0) > held)
        and (broken is None or (p.load.rate or 0.0) < broken)
    )
    return Edge(holds=held, fails=broken, gap=any(between))


def _median(point: Point, values: Values) -> float:
    found = point.distribution(values)
    return found.at(50).value if found else float("inf")


def _keeps(point: Point, slo: Slo, surely: bool) -> bool:
    found, goodput = point.distribution(ttft), point.goodput
    if found is None or goodput is None:
        return False
    late = found.at(99)
    first = slo.ttft is None or (late.high if surely else late.value) <= slo.ttft
    return first and goodput.value >= GOOD_SHARE
