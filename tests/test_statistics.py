"""Medians, ratios and verdicts, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_autoprune import statistics
from vllm_autoprune.statistics import (
    ClusterBootstrap,
    Estimate,
    at_most,
    count_decimals,
    estimate,
    ratio_of_medians,
    resample,
    spread,
)


def test_a_spread_has_median_and_quartiles() -> None:
    sample = spread([5, 1, 2, 4, 3])
    assert (sample.low, sample.median, sample.high, sample.count) == (2, 3, 4, 5)


def test_ratios_of_paired_rounds() -> None:
    assert ratio_of_medians([[2.2]] * 5, [[2.0]] * 5) == pytest.approx(Estimate(1.1, 1.1, 1.1))
    # Every round is as slow for one kind as for the other; the ratio is 2 in each of them.
    under = [[1.0], [10.0], [100.0], [1000.0], [10000.0]]
    over = [[2 * value for value in row] for row in under]
    assert ratio_of_medians(over, under) == Estimate(2.0, 2.0, 2.0)
    over, under = [[float(i % 7)] for i in range(40)], [[float(i % 5 + 1)] for i in range(40)]
    interval = ratio_of_medians(over, under)
    assert interval.low <= interval.value <= interval.high and interval.low < interval.high
    assert ratio_of_medians(over, under) == interval


@pytest.mark.parametrize("rounds", [([[1.0]], [[1.0]] * 2), ([], []), ([[]], [[]])])
def test_rounds_that_do_not_pair_are_refused(rounds: tuple[list[list[float]], ...]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        ratio_of_medians(*rounds)


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Estimate(1.02, 1.01, 1.05), "holds"),
        (Estimate(1.04, 1.02, 1.06), "inconclusive"),
        (Estimate(1.08, 1.06, 1.10), "does not hold"),
    ],
)
def test_an_upper_bound_is_judged_by_the_whole_interval(figure: Estimate, verdict: str) -> None:
    assert at_most(figure, 1.05) == verdict


SCENES = [number // 5 for number in range(200)]


def test_questions_about_one_image_are_drawn_together() -> None:
    """All right on half of the images: the error is that of 40 images, not of 200 questions."""
    bootstrap = ClusterBootstrap(SCENES)
    clustered = estimate(bootstrap.mean([float(scene % 2) for scene in SCENES]))
    assert clustered.value == 0.5
    assert abs(clustered.high - clustered.low - 2 * 1.96 * (0.25 / 40) ** 0.5) < 0.05
    mixed = estimate(bootstrap.mean([float(number % 2) for number in range(200)]))
    assert clustered.high - clustered.low > 1.5 * (mixed.high - mixed.low)


def test_figures_of_one_bootstrap_are_paired() -> None:
    bootstrap = ClusterBootstrap([f"image {scene}" for scene in SCENES])
    values = np.random.default_rng(1).random(200)
    gap = estimate(bootstrap.mean(values + 0.1) - bootstrap.mean(values))
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))


def test_questions_of_weight_zero_are_ignored() -> None:
    values = [float(number) for number in range(200)]
    figure = ClusterBootstrap(SCENES).mean(values, [float(value == 3) for value in values])
    assert figure[0] == 3 and np.isnan(figure).any()
    assert estimate(figure) == Estimate(3.0, 3.0, 3.0)


@pytest.mark.parametrize(("values", "clusters"), [([1.0], [0, 0]), ([], [])])
def test_one_value_for_each_question_is_needed(values: list[float], clusters: list[int]) -> None:
    with pytest.raises(ValueError, match="one each, at least one"):
        ClusterBootstrap(clusters).mean(values)


def test_resamples_begin_with_the_sample_and_draw_blocks_of_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = resample(37, 20, block=6)
    assert rows.shape == (21, 37) and (rows[0] == np.arange(37)).all()
    assert ((rows[1:, 1:6] - rows[1:, :5]) % 37 == 1).all()
    plain = resample(37, 20)
    monkeypatch.setattr(statistics, "_MAX_CELLS", 100)
    assert (resample(37, 20) == plain).all(), "they depend on the size of chunks"


@pytest.mark.parametrize(
    ("low", "high", "decimals"),
    [(-3.25, 5.09, 2), (-16.7, 33.3, 1), (100.0, 900.0, 0), (0.0312, 0.0523, 4), (1.0, 1.0, 4)],
)
def test_decimals_follow_the_width_of_an_interval(low: float, high: float, decimals: int) -> None:
    assert count_decimals(low, high) == decimals
