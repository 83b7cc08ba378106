"""One K for all pictures, as large on average as a share of each."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

import pytest

from benchmarks.accuracy.sizes import equal_budget
from benchmarks.yardsticks.yardstick import Budget


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        ("1/8", [64, 64], 8),
        ("1/8", [40, 120], 10),  # 5 and 15
        # 32 and 128; the small image has no more than 64, so that the large one gets 96.
        ("1/2", [64, 256], 96),
    ],
)
def test_one_budget_keeps_as_many_tokens_as_a_share(
    share: str, counts: list[int], expected: int
) -> None:
    by_share = Budget(share, Fraction(share))
    shared = equal_budget(by_share, counts)
    assert shared.limit == expected
    assert fmean(map(shared.tokens, counts)) == fmean(map(by_share.tokens, counts))
