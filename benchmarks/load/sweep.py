"""What a sweep of rates shows: the knee, and the highest rate that keeps the promise.

Knows nothing about how the rates were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.load.load import Slo
from benchmarks.load.plain import Plain
from benchmarks.load.points import Point, ttft
from benchmarks.load.verdict import KEPT_UP

GOOD_SHARE = 0.99
"""Share of requests that have to keep every promise."""
KNEE = 2.0
"""Past the knee, the median TTFT is more than so many times that of the lowest rate."""
STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep as shares of the capacity that a closed loop of the first arm shows."""


class Sweep(Plain):
    """One arm, over all rates that were tried; None where even the lowest is too much."""

    arm: str
    rates: tuple[float, ...]
    knee: float | None
    highest: float | None
    """The highest rate up to which p99 TTFT and goodput were kept."""
    surely: float | None
    """The same by the upper end of the p99 interval."""
    cut: bool
    """Whether the climb ended at a run that is not valid: the truth may lie higher."""
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
    """Of the open-loop points of one arm. A rate counts only where all lower ones hold too."""
    ordered = sorted((p for p in points if p.load.rate is not None), key=lambda p: p.load.rate or 0)
    lowest = ordered[0].distribution(ttft) if ordered else None
    bound = KNEE * lowest.at(50).value if lowest else 0.0
    return Sweep(
        arm=ordered[0].arm if ordered else "",
        rates=tuple(p.load.rate for p in ordered if p.load.rate is not None),
        knee=_last(ordered, [_keeps_up(p) and _median(p) <= bound for p in ordered]),
        highest=_last(ordered, [_keeps(p, slo, surely=False) for p in ordered]),
        surely=_last(ordered, [_keeps(p, slo, surely=True) for p in ordered]),
        cut=_cut(ordered, slo),
        saturated=any(p.valid and not _keeps_up(p) for p in ordered),
    )


def _last(ordered: Sequence[Point], holds: Sequence[bool]) -> float | None:
    """The rate before the first that does not hold."""
    kept = holds.index(False) if False in holds else len(holds)
    return ordered[kept - 1].load.rate if kept else None


def _cut(ordered: Sequence[Point], slo: Slo) -> bool:
    broken = [p for p in ordered if not _keeps(p, slo, surely=False)]
    return bool(broken) and not broken[0].valid


def _keeps_up(point: Point) -> bool:
    return point.valid and point.completed >= KEPT_UP * (point.offered or 0.0)


def _median(point: Point) -> float:
    found = point.distribution(ttft)
    return found.at(50).value if found else float("inf")


def _keeps(point: Point, slo: Slo, *, surely: bool) -> bool:
    found, goodput = point.distribution(ttft), point.goodput
    if not point.valid or found is None or goodput is None:
        return False
    late = found.at(99)
    first = slo.ttft is None or (late.high if surely else late.value) <= slo.ttft
    return first and goodput.value >= GOOD_SHARE
