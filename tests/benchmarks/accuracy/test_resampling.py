from __future__ import annotations

import numpy as np

from benchmarks.accuracy.resampling import DRAWS, Resampling, measured

IMAGES = [str(number // 4) for number in range(80)]
ONES = np.ones(80)


def test_the_value_is_the_mean_and_draws_scatter_around_it() -> None:
    values = (np.arange(80) % 4 == 0).astype(float)
    figure = Resampling(IMAGES).mean(values, ONES)
    assert figure.shape == (1 + DRAWS,) and figure[0] == 0.25
    # Every image has the same share: whatever images are drawn, the mean is the same.
    assert np.allclose(figure, 0.25)


def test_questions_about_one_image_share_its_luck() -> None:
    """All right on half of the images: the error is that of 20 images, not of 80 questions."""
    values = np.repeat(np.arange(20) % 2, 4).astype(float)
    found = measured(Resampling(IMAGES).mean(values, ONES))
    assert found is not None
    width = found.high - found.low
    assert found.value == 0.5
    assert abs(width - 2 * 1.96 * (0.25 / 20) ** 0.5) < 0.1
    assert width > 1.5 * 2 * 1.96 * (0.25 / 80) ** 0.5


def test_two_figures_are_drawn_alike_so_that_differences_are_paired() -> None:
    resampling, values = Resampling(IMAGES), np.random.default_rng(1).random(80)
    gap = resampling.mean(values + 0.1, ONES) - resampling.mean(values, ONES)
    found = measured(gap)
    assert found is not None and found.value == found.low == found.high == 0.1


def test_questions_without_weight_do_not_count() -> None:
    values = np.arange(80, dtype=float)
    figure = Resampling(IMAGES).mean(values, (values == 3).astype(float))
    assert figure[0] == 3 and np.isnan(figure).any()
    found = measured(figure)
    assert found is not None and found.low == found.high == 3.0


def test_nothing_to_take_a_mean_of_is_no_figure() -> None:
    assert measured(Resampling(IMAGES).mean(ONES, 0 * ONES)) is None
