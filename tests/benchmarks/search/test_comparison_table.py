from __future__ import annotations

import statistics

import pytest

from benchmarks.search.comparison_table import format_mean


@pytest.mark.parametrize(("count", "quantile"), [(5, 2.776), (10, 2.262), (11, 2.228), (24, 2.069)])
def test_mean_has_a_student_t_interval(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    half = quantile * statistics.stdev(values) / count**0.5
    mean, width = format_mean(values, 2).split(" ± ")
    assert float(mean) == pytest.approx((count - 1) / 2, abs=0.01)
    assert float(width) == pytest.approx(half, abs=0.01)


def test_mean_of_one_value_has_no_interval() -> None:
    assert format_mean([2.0]) == "2.0000"
