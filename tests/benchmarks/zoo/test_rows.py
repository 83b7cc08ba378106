"""Evidence of a state from its answers and those of the resize control."""

from __future__ import annotations

from benchmarks.minillava.split import draw_examples
from benchmarks.zoo.__main__ import Answers, build_rows


def test_rows_are_paired_with_the_resize_control() -> None:
    examples = draw_examples("test", 2)
    count = len(examples)
    right, half = [True] * count, [number % 2 == 0 for number in range(count)]
    (row,) = build_rows(examples, [Answers(8, right, 22.8)], [Answers(8, half, 22.8)])
    assert (row.budget, row.accuracy, row.accuracy_plus, row.prompt_tokens) == (8, 100, 100, 22.8)
    assert row.resized == round(100 * sum(half) / count, 2)
    assert row.less_resized is not None
    assert row.less_resized.value == round(100 - 100 * sum(half) / count, 2)
    assert row.less_resized.low <= row.less_resized.value <= row.less_resized.high
