"""Percentiles with bootstrap intervals: of one run, and ratios of two.

Neighbouring requests share a queue, so they are resampled in blocks of about sqrt(n); resampled one
by one, intervals would be too narrow. Percentiles are nearest rank: always a measured value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import StrictModel
from vllm_autoprune.statistics import Estimate, Floats, estimate, resample

Whole = NDArray[np.int64]

LEVELS = (50, 90, 95, 99)
DRAWS = 1000
ENOUGH = {50: 20, 90: 50, 95: 100, 99: 200}
"""Requests that a percentile needs to be quoted."""


class Quantile(StrictModel):
    """One percentile."""

    level: int
    estimate: Estimate
    enough: bool
    """Whether there are enough requests to estimate it."""


class Distribution(StrictModel):
    """Mean and percentiles of a sample."""

    count: int
    """Values, not requests."""
    mean: float
    quantiles: tuple[Quantile, ...]

    def at(self, level: int) -> Estimate:
        """The estimate of one percentile, which is one of LEVELS."""
        return next(q.estimate for q in self.quantiles if q.level == level)


@dataclass(frozen=True)
class Sample:
    """Values (V,) and the number of the request (V,) that each was measured on, from 0."""

    values: Floats
    owners: Whole

    @classmethod
    def by_request(cls, values: Sequence[Sequence[float]]) -> Sample:
        """Build from one list of values for each request, in order of the schedule."""
        owners = [number for number, own in enumerate(values) for _ in own]
        flat = [value for own in values for value in own]
        return cls(np.asarray(flat, dtype=np.float64), np.asarray(owners, dtype=np.int64))

    def percentiles(self, levels: Sequence[float], weights: Floats) -> Floats:
        """Nearest-rank percentiles (draws, levels); NaN where a draw has no value.

        ``weights`` (draws, requests): how often each request was drawn.
        """
        order = np.argsort(self.values, kind="stable")
        values, owners = self.values[order], self.owners[order]
        shares = np.asarray(levels) / 100
        percentiles = np.full((len(weights), len(levels)), np.nan)
        for number, drawn in enumerate(weights):
            reached = np.cumsum(drawn[owners])
            if reached[-1]:
                # Rounding must not push a rank that is met exactly on to the next value.
                places = np.searchsorted(reached, shares * reached[-1] - 1e-9)
                percentiles[number] = values[places]
        return percentiles


def resample_weights(requests: int) -> Floats:
    """How often each request occurs in the sample and in each resample, (1 + draws, requests)."""
    rows = resample(requests, DRAWS, block=max(1, round(requests**0.5)))
    counts = np.zeros((len(rows), requests))
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1.0)
    return counts


def distribution(by_request: Sequence[Sequence[float]]) -> Distribution | None:
    """Percentiles of the values of all requests; None where there is no value."""
    sample = Sample.by_request(by_request)
    if not len(sample.values):
        return None
    percentiles = sample.percentiles(LEVELS, resample_weights(len(by_request)))
    return Distribution(
        count=len(sample.values),
        mean=float(sample.values.mean()),
        quantiles=tuple(
            Quantile(
                level=level,
                estimate=estimate(percentiles[:, place]),
                enough=len(by_request) >= ENOUGH[level],
            )
            for place, level in enumerate(LEVELS)
        ),
    )


def share(good: Sequence[bool]) -> Estimate | None:
    """The share of requests that are good; None where there is no request."""
    if not good:
        return None
    values = np.asarray(good, dtype=np.float64)
    return estimate(resample_weights(len(values)) @ values / len(values))


def ratio(
    over: Sequence[Sequence[float]], under: Sequence[Sequence[float]], level: float
) -> Estimate | None:
    """percentile(over) / percentile(under); both list the same requests, resampled together.

    None where either has no value. Raises ValueError where the lists differ in length.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} requests cannot be paired with {len(under)}")
    first, second = Sample.by_request(over), Sample.by_request(under)
    if not len(first.values) or not len(second.values):
        return None
    weights = resample_weights(len(over))
    ratios = first.percentiles([level], weights) / second.percentiles([level], weights)
    return estimate(ratios[:, 0])
