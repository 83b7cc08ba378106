"""Medians, quartiles, ratios with bootstrap intervals, slopes, and verdicts.

Knows nothing about what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rounds = Sequence[Sequence[float]]
"""One row a round, one value a request; what one round shares (load, batching) stays together."""

Verdict = Literal["holds", "does not hold", "open"]
"""Open: the interval contains the bound, so that this run cannot tell."""

DRAWS = 4000
SEED = 0


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of a sample that is not empty; quartiles are interpolated."""
    low, median, high = np.percentile(np.asarray(values, dtype=np.float64), (25, 50, 75))
    return Spread(float(median), float(low), float(high), len(values))


def ratio_of_medians(over: Rounds, under: Rounds) -> Estimate:
    """median(over) / median(under), resampled by rounds, which are paired."""
    return _compared(over, under, lambda a, b: a / b)


def difference_of_medians(over: Rounds, under: Rounds) -> Estimate:
    """median(over) - median(under), resampled by rounds, which are paired."""
    return _compared(over, under, lambda a, b: a - b)


def _compared(over: Rounds, under: Rounds, compare: Callable[[Floats, Floats], Floats]) -> Estimate:
    first, second = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    if first.ndim != 2 or second.ndim != 2 or len(first) != len(second) or not first.size:
        raise ValueError(f"rounds of shapes {first.shape} and {second.shape} cannot be paired")
    picks = np.random.default_rng(SEED).integers(len(first), size=(DRAWS, len(first)))
    drawn = compare(
        np.median(first[picks].reshape(DRAWS, -1), axis=1),
        np.median(second[picks].reshape(DRAWS, -1), axis=1),
    )
    value = compare(np.median(first, keepdims=True)[0], np.median(second, keepdims=True)[0])
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(float(value[0]), float(low), float(high))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil and Sen's: the median over all pairs of points, which a few jumps do not move."""
    at, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(at), k=1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first])))


def at_most(estimate: Estimate, bound: float) -> Verdict:
    """Whether a figure is at most ``bound``, as far as its interval can tell."""
    if estimate.high <= bound:
        return "holds"
    return "does not hold" if estimate.low > bound else "open"


def within(estimate: Estimate, low: float, high: float) -> Verdict:
    """Whether a figure lies in ``[low, high]``, as far as its interval can tell."""
    if low <= estimate.low and estimate.high <= high:
        return "holds"
    return "does not hold" if estimate.low > high or estimate.high < low else "open"


def plainly(true: bool) -> Verdict:
    """The verdict on what was counted, not sampled."""
    return "holds" if true else "does not hold"
