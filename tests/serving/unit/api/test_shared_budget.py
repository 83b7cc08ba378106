from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.api.pruning_choice import split_shared_budget


@pytest.mark.parametrize(
    ("total", "sizes", "budgets"),
    [
        (96, [576, 576], [48, 48]),
        (10, [576, 576, 576], [4, 3, 3]),
        (96, [10, 576, 576], [10, 43, 43]),
        (97, [576, 10, 576], [44, 10, 43]),
        (1000, [10, 20], [10, 20]),
        (2, [1, 1], [1, 1]),
        (5, [576], [5]),
    ],
)
def test_even_shares_with_the_surplus_given_to_the_others(
    total: int, sizes: list[int], budgets: list[int]
) -> None:
    assert split_shared_budget(total, sizes) == budgets


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5000))
def test_shares_sum_to_the_total_and_never_exceed_what_each_has(
    sizes: list[int], total: int
) -> None:
    budgets = split_shared_budget(total, sizes)
    assert sum(budgets) == min(total, sum(sizes))
    assert all(0 <= budget <= size for budget, size in zip(budgets, sizes, strict=True))
    if total >= len(sizes):
        assert min(budgets) >= 1
    # An image that could take more has at least what any other has, but for the remainder.
    open_ = [b for b, size in zip(budgets, sizes, strict=True) if b < size]
    assert all(max(budgets) - b <= 1 for b in open_)
