"""Medians, intervals and verdicts, against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.tables import parametrize_from_file
from vllm_autoprune import statistics
from vllm_autoprune.statistics import (
    ClusterBootstrap,
    Estimate,
    Spread,
    resample,
    round_portably,
)

SCENES = [number // 5 for number in range(200)]


def test_a_spread_has_median_and_quartiles() -> None:
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(median=3, low=2, high=4, count=5)


def test_a_half_is_rounded_alike_whatever_the_last_bits_of_a_sum() -> None:
    half = -0.16045
    sums = (math.nextafter(half, -1), half, math.nextafter(half, 0))
    assert len({round(figure, 4) for figure in sums}) == 2
    assert {round_portably(figure, 4) for figure in sums} == {-0.1605}
    assert {f"{round_portably(figure):.4f}" for figure in sums} == {"-0.1605"}


def test_rounds_of_a_ratio_are_drawn_together() -> None:
    # Every round is as slow for one kind as for the other; the ratio is 2 in each of them.
    under = [1.0, 10.0, 100.0, 1000.0, 10000.0]
    assert Estimate.ratio_of_medians([2 * x for x in under], under) == Estimate(
        2.0, 2.0, 2.0
    )
    over = [float(n % 7) for n in range(40)]
    under = [float(n % 5 + 1) for n in range(40)]
    ratio = Estimate.ratio_of_medians(over, under)
    assert ratio.low < ratio.value == 1.0 < ratio.high
    assert Estimate.ratio_of_medians(over, under) == ratio


def test_the_interval_of_a_repetition_is_of_differences_between_resamples() -> None:
    # Resamples less those two further on: -4, -8, 4, 8.
    figure = np.array([10.0, 0.0, 0.0, 4.0, 8.0])
    repetition = Estimate.of_repetition(figure)
    # 0.5 % of the way through four values is 0.015 of the first step.
    assert (repetition.value, repetition.low, repetition.high) == pytest.approx(
        (10.0, 2.0 + 0.015 * 4.0, 18.0 - 0.015 * 4.0)
    )


def test_resamples_without_a_figure_are_left_out_of_the_interval() -> None:
    figure = np.array([1.0, np.nan, 2.0, np.inf, 4.0])
    assert Estimate.of(figure) == Estimate(1.0, 2.05, 3.95)
    assert Estimate.of(figure[:2]) == Estimate(1.0, 1.0, 1.0)


def test_questions_about_one_image_are_drawn_together() -> None:
    """All right on half of the images: the error is that of 40 images, not of 200 questions."""
    bootstrap = ClusterBootstrap(SCENES)
    clustered = Estimate.of(bootstrap.mean([float(scene % 2) for scene in SCENES]))
    assert clustered.value == 0.5
    assert abs(clustered.high - clustered.low - 2 * 1.96 * (0.25 / 40) ** 0.5) < 0.05
    mixed = Estimate.of(bootstrap.mean([float(number % 2) for number in range(200)]))
    assert clustered.high - clustered.low > 1.5 * (mixed.high - mixed.low)


def test_figures_of_one_bootstrap_are_paired_and_weights_leave_out_questions() -> None:
    bootstrap = ClusterBootstrap([f"image {scene}" for scene in SCENES])
    values = np.random.default_rng(1).random(200)
    gap = Estimate.of(bootstrap.mean(values + 0.1) - bootstrap.mean(values))
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))
    # Resamples without the only question that counts have no figure.
    figure = bootstrap.mean(range(200), [float(number == 3) for number in range(200)])
    assert np.isnan(figure).any() and Estimate.of(figure) == Estimate(3.0, 3.0, 3.0)


def test_resamples_begin_with_the_sample_and_draw_blocks_of_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = resample(37, 20, block=6)
    plain = resample(37, 20)
    assert rows.shape == (21, 37) and (rows[0] == np.arange(37)).all()
    assert ((rows[1:, 1:6] - rows[1:, :5]) % 37 == 1).all()
    monkeypatch.setattr(statistics, "_MAX_CELLS", 100)
    assert (resample(37, 20) == plain).all(), "they depend on the size of chunks"


@parametrize_from_file("low", "high", "decimals", "verdict")
def test_decimals_and_verdicts_follow_the_interval(
    low: float, high: float, decimals: int, verdict: str
) -> None:
    assert Estimate(low, low, high).count_decimals() == decimals
    assert Estimate(low, low, high).at_most(bound=1.05) == verdict
