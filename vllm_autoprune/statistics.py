"""Estimates with 95 % bootstrap intervals, medians and quartiles, and verdicts on bounds.

Every interval is a percentile bootstrap (Efron 1979). What is drawn depends on the benchmark:
rounds of alternating measurements, images (questions about one image are correlated), or blocks of
neighbouring requests, which share a queue (circular block bootstrap, Politis & Romano 1992).

Figures are computed for the sample itself and for all its resamples at once: the first entry of
such a vector is the value, the others give the interval (:meth:`Estimate.of`). Figures of the same
resamples can be added, subtracted and divided, and stay paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]
Verdict = Literal["holds", "does not hold", "inconclusive"]
"""Inconclusive: the interval contains the bound."""

DRAWS = 4000
_PORTABLE_DIGITS = 10
"""Decimals on which all CPUs agree."""
_CLUSTER_DRAWS = 2000
_MAX_CELLS = 4_000_000
"""_Indices held in memory at once: a benchmark may have a hundred thousand images."""


def round_portably(figure: float, digits: int = _PORTABLE_DIGITS) -> float:
    """Round a figure to the same number on every CPU.

    Sums by BLAS and LAPACK differ in their last bits between CPUs, which would decide a half: of
    five-digit values a mean of few is often one.
    """
    return round(round(figure, _PORTABLE_DIGITS), digits)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int) -> Estimate:
        """The same estimate with fewer decimals."""
        return Estimate(
            *(
                round_portably(figure, digits)
                for figure in (self.value, self.low, self.high)
            )
        )

    def without_interval(self) -> Estimate:
        """The figure alone, within infinite bounds: too few samples bound it nowhere."""
        return Estimate(self.value, -math.inf, math.inf)

    @property
    def is_bounded(self) -> bool:
        """Whether it has an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def at_most(self, bound: float) -> Verdict:
        """Whether the figure is at most ``bound``: decided by its whole interval."""
        if self.high <= bound:
            return "holds"
        return "does not hold" if self.low > bound else "inconclusive"

    @classmethod
    def of(cls, figure: Floats) -> Estimate:
        """Value and interval of a figure: its value, then its values on the resamples.

        Resamples on which the figure is not defined (not a number) are left out.
        """
        drawn = figure[1:][np.isfinite(figure[1:])]
        low, high = (
            np.percentile(drawn, (2.5, 97.5)) if len(drawn) else (figure[0], figure[0])
        )
        return cls(float(figure[0]), float(low), float(high))

    @classmethod
    def of_repetition(cls, figure: Floats) -> Estimate:
        """As :meth:`of`, with the interval in which a repetition of the measurement falls.

        A repetition differs from the measurement as two of its resamples differ. The interval is
        the 99 % one, because those of few rounds are too narrow.
        """
        spread = figure[1:] - np.roll(figure[1:], len(figure) // 2)
        low, high = np.percentile(figure[0] + spread, (0.5, 99.5))
        return cls(float(figure[0]), float(low), float(high))

    @classmethod
    def ratio_of_medians(
        cls, over: Sequence[float], under: Sequence[float]
    ) -> Estimate:
        """median(over) / median(under) of paired rounds, drawn together."""
        rows = resample(len(over), DRAWS)
        top, bottom = (
            np.median(np.asarray(values)[rows], axis=1) for values in (over, under)
        )
        return cls.of(top / bottom)

    def count_decimals(self, maximum: int = 4) -> int:
        """Decimals that show three digits of the width of the interval, as more say nothing."""
        width = self.high - self.low
        return (
            maximum
            if width <= 0
            else min(max(2 - math.floor(math.log10(width)), 0), maximum)
        )


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and interpolated quartiles of a sample that is not empty."""
        low, median, high = np.percentile(
            np.asarray(values, dtype=np.float64), (25, 50, 75)
        )
        return cls(float(median), float(low), float(high), len(values))


def correlate_ranks(figures: Floats, references: Floats) -> Floats:
    """Spearman's rank correlation of two figures, ``(S, ...)`` each, over S; ties share a rank."""
    # Twice the mean-centred rank is the number of smaller values minus that of larger ones.
    ranks, reference_ranks = (
        np.sign(values[:, None] - values).sum(axis=1)
        for values in (figures, references)
    )
    with np.errstate(invalid="ignore"):
        spread = np.sqrt((ranks**2).sum(axis=0) * (reference_ranks**2).sum(axis=0))
        correlation: Floats = (ranks * reference_ranks).sum(axis=0) / spread
    return correlation


def resample(count: int, draws: int, *, block: int = 1) -> _Indices:
    """The sample itself and ``draws`` resamples of it, as indices ``(1 + draws, count)``.

    ``block``: how many neighbours are drawn together, cyclically; 1 is the ordinary bootstrap.
    """
    return np.concatenate(list(_resample_in_chunks(count, draws, block)))


def _resample_in_chunks(count: int, draws: int, block: int = 1) -> Iterator[_Indices]:
    """The rows of :func:`resample`, as many at once as memory allows."""
    yield np.arange(count)[None]
    generator = np.random.default_rng(0)
    chunk = max(1, _MAX_CELLS // max(count, 1))
    for start in range(0, draws, chunk):
        # As many starts as blocks fill a resample, of which the last is cut.
        size = (min(chunk, draws - start), -(-count // block), 1)
        rows = (generator.integers(count, size=size) + np.arange(block)) % count
        yield rows.reshape(len(rows), -1)[:, :count]


class ClusterBootstrap:
    """Means over questions whose images are resampled, because questions about one image correlate.

    ``clusters`` names the image (or scene) of each question, ``(M,)``.
    """

    def __init__(self, clusters: Sequence[int] | Sequence[str]) -> None:
        names, self._places = np.unique(np.asarray(clusters), return_inverse=True)
        self._count = len(names)

    def mean(
        self,
        values: Sequence[float] | Floats,
        weights: Sequence[float] | Floats | None = None,
    ) -> Floats:
        """Weighted mean of the sample and of every resample, ``(1 + draws,)``.

        values, weights: ``(M,)``. Not a number where all weights of a resample are 0.
        """
        used = (
            np.ones(len(values))
            if weights is None
            else np.asarray(weights, dtype=np.float64)
        )
        weighted = np.asarray(values, dtype=np.float64) * used
        sums, counts = (
            np.bincount(self._places, part, self._count) for part in (weighted, used)
        )
        over = []
        under = []
        for rows in _resample_in_chunks(self._count, _CLUSTER_DRAWS):
            over.append(sums[rows].sum(axis=1))
            under.append(counts[rows].sum(axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = np.concatenate(over) / np.concatenate(under)
        return mean
