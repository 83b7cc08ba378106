"""Figures over questions with paired 95 % intervals: images are resampled, for all cases alike.

Knows nothing about cases. A figure is a vector: its value on all images, then on every resampling
of them; figures are added and subtracted as vectors, so that differences stay paired.
Percentile bootstrap (Efron 1979), clustered, because questions about one image share its luck.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offline_search.ledger.records import IntervalEstimate

Floats = NDArray[np.float64]

DRAWS = 2000
_SEED = 0
_CELLS = 4_000_000
"""Weights that are held at once: benchmarks may have a hundred thousand images."""


class Resampling:
    """Means over questions, whose images are given one for each question, ``(M,)``."""

    def __init__(self, images: Sequence[str]) -> None:
        _, self._places = np.unique(np.asarray(images), return_inverse=True)
        self._count = int(self._places.max()) + 1 if len(images) else 0

    def mean(self, values: Floats, weights: Floats) -> Floats:
        """Weighted mean ``(1 + DRAWS,)``; not a number in draws with no weight at all.

        values, weights: ``(M,)``; a question of weight 0 does not count.
        """
        sums = np.bincount(self._places, values * weights, self._count)
        counts = np.bincount(self._places, weights, self._count)
        over, under = self._drawn(np.stack((sums, counts), axis=1)).T
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = over / under
        return mean

    def _drawn(self, sums: Floats) -> Floats:
        """Sums over all images, then over each draw of as many images: ``(1 + DRAWS, F)``."""
        generator = np.random.default_rng(_SEED)
        found = [sums.sum(axis=0, keepdims=True)]
        at_once = max(1, _CELLS // max(self._count, 1))
        for start in range(0, DRAWS, at_once):
            draws = min(at_once, DRAWS - start)
            picks = generator.integers(self._count, size=(draws, self._count))
            found.append(sums[picks].sum(axis=1))
        return np.concatenate(found)


def measured(figure: Floats, digits: int = 4) -> IntervalEstimate | None:
    """Value and interval of a figure; None where it has no value."""
    if not np.isfinite(figure[0]):
        return None
    drawn = figure[1:][np.isfinite(figure[1:])]
    low, high = np.percentile(drawn, (2.5, 97.5)) if len(drawn) else (figure[0], figure[0])
    return IntervalEstimate(
        value=round(float(figure[0]), digits),
        low=round(float(low), digits),
        high=round(float(high), digits),
    )
