"""Medians, ratios, slopes and verdicts, against figures worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.overhead.statistics import (
    Estimate,
    at_most,
    difference_of_medians,
    plainly,
    ratio_of_medians,
    slope,
    spread,
    within,
)


def test_a_spread_has_median_and_quartiles() -> None:
    found = spread([5, 1, 2, 4, 3])

    assert (found.low, found.median, found.high, found.count) == (2, 3, 4, 5)


def test_rounds_that_are_all_alike_leave_no_doubt() -> None:
    assert ratio_of_medians([[2.2]] * 5, [[2.0]] * 5) == pytest.approx(Estimate(1.1, 1.1, 1.1))
    assert difference_of_medians([[3, 5]] * 4, [[1, 2]] * 4) == Estimate(2.5, 2.5, 2.5)


def test_rounds_are_paired_so_a_slow_machine_cancels_out() -> None:
    # Every round is as slow for one kind as for the other; the ratio is 2 in each of them.
    under = [[1.0], [10.0], [100.0], [1000.0], [10000.0]]
    over = [[2 * value for value in row] for row in under]

    assert ratio_of_medians(over, under) == Estimate(2.0, 2.0, 2.0)


def test_the_interval_holds_the_value_and_is_the_same_every_time() -> None:
    over, under = [[float(i % 7)] for i in range(40)], [[float(i % 5 + 1)] for i in range(40)]

    first = ratio_of_medians(over, under)

    assert first.low <= first.value <= first.high
    assert first.low < first.high
    assert ratio_of_medians(over, under) == first


@pytest.mark.parametrize(("over", "under"), [([[1.0]], [[1.0]] * 2), ([], []), ([[]], [[]])])
def test_rounds_that_do_not_pair_are_refused(
    over: list[list[float]], under: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        ratio_of_medians(over, under)


def test_a_slope_survives_one_jump() -> None:
    x = [0.0, 1, 2, 3, 4, 5, 6]

    assert slope(x, [2 * value + 1 for value in x]) == 2
    assert slope(x, [1, 3, 5, 700, 9, 11, 13]) == 2


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(1.02, 1.01, 1.05), "holds"),
        (Estimate(1.04, 1.02, 1.06), "open"),
        (Estimate(1.08, 1.06, 1.10), "does not hold"),
    ],
)
def test_the_whole_interval_decides(estimate: Estimate, verdict: str) -> None:
    assert at_most(estimate, 1.05) == verdict


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(1.0, 0.995, 1.005), "holds"),
        (Estimate(0.99, 0.98, 1.0), "open"),
        (Estimate(0.9, 0.85, 0.95), "does not hold"),
        (Estimate(1.1, 1.05, 1.15), "does not hold"),
    ],
)
def test_a_figure_may_lie_outside_on_either_side(estimate: Estimate, verdict: str) -> None:
    assert within(estimate, 0.99, 1.01) == verdict


def test_a_count_is_decided_plainly() -> None:
    assert (plainly(True), plainly(False)) == ("holds", "does not hold")
