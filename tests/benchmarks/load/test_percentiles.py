"""Percentiles and their intervals on samples of known distribution."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.load.percentiles import Sample, distribution, ratio, resample_weights, share


def single(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


def test_percentiles_are_nearest_rank() -> None:
    result = distribution(single([float(n) for n in range(1, 101)]))
    assert result is not None
    assert [result.at(level).value for level in (50, 90, 95, 99)] == [50, 90, 95, 99]
    assert (result.count, result.mean) == (100, 50.5)


def test_intervals_have_their_nominal_coverage() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        result = distribution(single(list(generator.exponential(1.0, 150))))
        assert result is not None
        estimate = result.at(50)
        covered += estimate.low <= np.log(2) <= estimate.high
    assert 33 <= covered <= 40


def test_correlated_neighbours_widen_the_interval() -> None:
    """The same values in waves and shuffled: blocks of neighbours are resampled."""
    waves = list(np.sin(np.arange(400) / 40) + 2)
    shuffled = list(np.random.default_rng(0).permutation(waves))

    def width(values: list[float]) -> float:
        result = distribution(single(values))
        assert result is not None
        return result.at(50).high - result.at(50).low

    assert width(waves) > 2 * width(shuffled)


def test_gaps_of_a_request_are_resampled_together() -> None:
    """Two kinds of requests; if gaps were resampled singly, the interval would be too narrow."""
    mixed = [[1.0] * 50 if n % 2 else [2.0] * 50 for n in range(8)]
    result = distribution(mixed)
    assert result is not None
    assert (result.at(50).low, result.at(50).high) == (1.0, 2.0)


def test_every_resample_has_the_size_of_the_sample() -> None:
    counts = resample_weights(37)
    assert (counts[0] == 1).all() and (counts.sum(axis=1) == 37).all()


def test_paired_ratios_recover_a_common_factor_exactly() -> None:
    base = [float(v) for v in np.random.default_rng(1).exponential(1.0, 60)]
    result = ratio(single([0.5 * v for v in base]), single(base), 99)
    assert result is not None
    assert (result.value, result.low, result.high) == pytest.approx((0.5, 0.5, 0.5))


def test_samples_of_different_length_are_not_paired() -> None:
    with pytest.raises(ValueError, match="3 requests cannot be paired with 2"):
        ratio(single([1, 2, 3]), single([1, 2]), 50)
    assert ratio([[]], [[1.0]], 50) is None


def test_few_requests_are_flagged() -> None:
    result = distribution(single([1.0] * 60))
    assert result is not None
    assert [q.level for q in result.quantiles if not q.enough] == [95, 99]


def test_empty_samples_give_none() -> None:
    assert distribution([]) is None and distribution([[], []]) is None and share([]) is None


def test_shares_and_resampling_weights() -> None:
    result = share([True, True, False, True])
    assert result is not None and result.value == 0.75
    sample = Sample.by_request([[1.0], [2.0, 3.0]])
    weights = np.array([[0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    assert np.allclose(
        sample.percentiles([50, 99], weights),
        [[2.0, 3.0], [1.0, 1.0], [np.nan, np.nan]],
        equal_nan=True,
    )
