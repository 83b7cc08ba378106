from __future__ import annotations

import statistics

from benchmarks.search.comparison_table import format_mean


def test_mean_has_a_student_t_interval() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    half = 2.776 * statistics.stdev(values) / 5**0.5
    assert format_mean(values) == f"3.0000 ± {half:.4f}"
    assert format_mean([2.0]) == "2.0000"
