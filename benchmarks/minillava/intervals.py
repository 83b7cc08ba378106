"""Differences between answers to the same questions, with paired bootstrap intervals.

Knows nothing about models. Scenes are resampled, because questions about one scene share its
luck; every figure of one draw is taken on the same scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 2000
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, in the unit of the values."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float], scenes: Sequence[int]) -> Interval:
    """The mean over questions; `scenes` names the scene of each."""
    sums, counts = _by_scene(values, scenes)
    return _drawn(sums, counts)


def difference(over: Sequence[float], under: Sequence[float], scenes: Sequence[int]) -> Interval:
    """mean(over) - mean(under), question by question the same."""
    if len(over) != len(under):
        raise ValueError(f"{len(over)} values cannot be paired with {len(under)}")
    return mean([a - b for a, b in zip(over, under, strict=True)], scenes)


def _by_scene(values: Sequence[float], scenes: Sequence[int]) -> tuple[Floats, Floats]:
    if len(values) != len(scenes) or not values:
        raise ValueError(f"{len(values)} values for {len(scenes)} scenes; one each, at least one")
    _, places = np.unique(np.asarray(scenes), return_inverse=True)
    weights = np.asarray(values, dtype=np.float64)
    return np.bincount(places, weights).astype(np.float64), np.bincount(places).astype(np.float64)


def _drawn(sums: Floats, counts: Floats) -> Interval:
    generator = np.random.default_rng(_SEED)
    picks = generator.integers(len(sums), size=(DRAWS, len(sums)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))
