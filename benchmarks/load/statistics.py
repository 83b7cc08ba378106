"""Percentiles with bootstrap intervals, of one run and of the ratio of two.

Knows nothing about requests: values come with the number of the request that each belongs to.

Neighbouring requests share a queue, so they are resampled in blocks (circular block bootstrap,
Politis & Romano 1992, blocks of about sqrt(n)); single resampling would make intervals too narrow.
Percentiles are nearest rank: always a value that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.load.plain import Plain

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

LEVELS = (50, 90, 95, 99)
DRAWS = 1000
ENOUGH = {50: 20, 90: 50, 95: 100, 99: 200}
"""Requests below which a percentile rests on too few of them to be quoted."""


class Estimate(Plain):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Quantile(Plain):
    """One percentile."""

    level: int
    estimate: Estimate
    enough: bool
    """Whether enough requests stand behind it."""


class Distribution(Plain):
    """A sample, summed up."""

    count: int
    """Values, not requests."""
    mean: float
    quantiles: tuple[Quantile, ...]

    def at(self, level: int) -> Estimate:
        """The estimate of one percentile; raises StopIteration for a level that is not kept."""
        return next(q.estimate for q in self.quantiles if q.level == level)


@dataclass(frozen=True)
class Sample:
    """Values (V,) and the number of the request (V,) that each was measured on, from 0."""

    values: Floats
    owners: Whole

    @classmethod
    def of(cls, by_request: Sequence[Sequence[float]]) -> Sample:
        """From one list of values for each request, in order of the schedule."""
        owners = [number for number, values in enumerate(by_request) for _ in values]
        flat = [value for values in by_request for value in values]
        return cls(np.asarray(flat, dtype=np.float64), np.asarray(owners, dtype=np.int64))

    def percentiles(self, levels: Sequence[float], weights: Floats) -> Floats:
        """Nearest rank, (draws, levels); ``weights`` (draws, requests) says how often each request
        was drawn. NaN where a draw has no value."""
        order = np.argsort(self.values, kind="stable")
        values, owners = self.values[order], self.owners[order]
        shares = np.asarray(levels) / 100
        found = np.full((len(weights), len(levels)), np.nan)
        for number, drawn in enumerate(weights):
            reached = np.cumsum(drawn[owners])
            if reached[-1]:
                # Rounding must not push a rank that is met exactly on to the next value.
                places = np.searchsorted(reached, shares * reached[-1] - 1e-9)
                found[number] = values[places]
        return found

    def plain(self, levels: Sequence[float]) -> Floats:
        """Of the sample as it is, (levels,)."""
        found: Floats = self.percentiles(levels, np.ones((1, self.owners.max() + 1)))[0]
        return found


def resamples(requests: int, draws: int = DRAWS, seed: int = 0) -> Floats:
    """How often each request occurs in each draw, (draws, requests)."""
    length = max(1, round(requests**0.5))
    blocks = -(-requests // length)
    starts = np.random.default_rng(seed).integers(requests, size=(draws, blocks, 1))
    picks = ((starts + np.arange(length)) % requests).reshape(draws, -1)[:, :requests]
    counts = np.zeros((draws, requests))
    np.add.at(counts, (np.arange(draws)[:, None], picks), 1.0)
    return counts


def distribution(by_request: Sequence[Sequence[float]]) -> Distribution | None:
    """Percentiles of the values of all requests; None where there is no value."""
    sample = Sample.of(by_request)
    if not len(sample.values):
        return None
    values = sample.plain(LEVELS)
    drawn = sample.percentiles(LEVELS, resamples(len(by_request)))
    return Distribution(
        count=len(sample.values),
        mean=float(sample.values.mean()),
        quantiles=tuple(
            Quantile(
                level=level,
                estimate=_estimate(float(values[place]), drawn[:, place]),
                enough=len(by_request) >= ENOUGH[level],
            )
            for place, level in enumerate(LEVELS)
        ),
    )


def share(good: Sequence[bool]) -> Estimate | None:
    """The share of requests that are good; None of no request."""
    if not good:
        return None
    values = np.asarray(good, dtype=np.float64)
    return _estimate(float(values.mean()), resamples(len(values)) @ values / len(values))


def ratio(
    over: Sequence[Sequence[float]], under: Sequence[Sequence[float]], level: float
) -> Estimate | None:
    """percentile(over) / percentile(under); both list the same requests, drawn together.

    None where either has no value. Raises ValueError where the lists do not have one length.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} requests cannot be paired with {len(under)}")
    first, second = Sample.of(over), Sample.of(under)
    if not len(first.values) or not len(second.values):
        return None
    weights = resamples(len(over))
    drawn = first.percentiles([level], weights) / second.percentiles([level], weights)
    value = first.plain([level]) / second.plain([level])
    return _estimate(float(value[0]), drawn[:, 0])


def _estimate(value: float, drawn: Floats) -> Estimate:
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return Estimate(value=value, low=float(low), high=float(high))
