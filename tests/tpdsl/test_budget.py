from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import state
from vllm_autoprune import materialize
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.budget import FIXED_BUDGETS, split_over_tiles


def test_the_ten_budgets() -> None:
    assert FIXED_BUDGETS == (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
    assert ATOMS.names("budget_control")[:10] == [f"fixed_budget@{k}" for k in FIXED_BUDGETS]


@pytest.mark.parametrize("k", FIXED_BUDGETS)
def test_each_budget_is_the_number_in_its_name(k: int) -> None:
    assert materialize(state({"/budget": {"atom": f"fixed_budget@{k}"}})).budget == k


def test_tiles_share_evenly_and_the_first_take_the_rest() -> None:
    assert split_over_tiles(160, 5) == (32, 32, 32, 32, 32)
    assert split_over_tiles(17, 5) == (4, 4, 3, 3, 3)
    assert split_over_tiles(2, 5) == (1, 1, 0, 0, 0)


@given(budget=st.integers(1, 5000), tiles=st.integers(1, 40))
def test_shares_add_up_and_differ_by_one_at_most(budget: int, tiles: int) -> None:
    shares = split_over_tiles(budget, tiles)
    assert len(shares) == tiles and sum(shares) == budget
    assert shares[0] - shares[-1] <= 1 and list(shares) == sorted(shares, reverse=True)
