from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, images, state
from vllm_autoprune import BudgetError, StateError, materialize, refine, safety_check
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS, run_budget
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.tokens import split_over_tiles


def test_the_ten_budgets() -> None:
    assert FIXED_BUDGETS == (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
    assert ATOMS.names("budget_control")[:10] == [f"fixed_budget@{k}" for k in FIXED_BUDGETS]


@means(*(f"fixed_budget@{k}" for k in FIXED_BUDGETS))
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


@means("ratio_budget")
@pytest.mark.parametrize(
    ("ratio", "tokens", "kept"),
    [
        (0.1, 576, 57),
        (0.3, 100, 30),  # 0.3 x 100 is 29.99... in binary fractions
        (0.25, 2880, 640),  # the ceiling
        (0.01, 576, 16),  # the floor
        (1.0, 500, 500),
    ],
)
def test_a_ratio_of_the_tokens_rounded_down(ratio: float, tokens: int, kept: int) -> None:
    assert run_budget(call("ratio_budget", ratio=ratio), tokens) == kept
    assert materialize(state({"/budget": {"atom": "ratio_budget", "ratio": ratio}})).tokens_kept(
        tokens
    ) == min(kept, tokens)


@means("per_tile_budget")
def test_budget_per_tile_is_limited_by_the_ceiling() -> None:
    budget = call("per_tile_budget", k=40, ceiling=100)
    assert [run_budget(budget, 576 * t, t) for t in (1, 2, 3, 5)] == [40, 80, 100, 100]


def test_ceiling_wins_over_a_higher_floor() -> None:
    crossed = call("ratio_budget", floor=64, ceiling=32)
    assert run_budget(crossed, 576) == 32 and crossed.range() == (32, 32)


RATIO: dict[str, object] = {
    "/budget": {"atom": "ratio_budget", "ratio": 0.25, "floor": 4, "ceiling": 64}
}


class TestVarying:
    """A budget that follows the size of an image."""

    def test_the_policy_of_a_size_is_the_policy_at_that_budget(self) -> None:
        policy = materialize(state(RATIO))
        assert (policy.varies, policy.budget) == (True, 64)
        assert policy.at(100) == materialize(state(RATIO), 25)
        assert [policy.tokens_kept(n) for n in (3, 8, 100, 5000)] == [3, 4, 25, 64]

    def test_another_budget_is_fixed(self) -> None:
        policy = materialize(state(RATIO), 10)
        assert not policy.varies and policy.at(576) is policy and policy.tokens_kept(576) == 10

    def test_images_are_pruned_to_their_own_k(self) -> None:
        tokens = images(1)
        actual = refine(materialize(state(RATIO)), tokens)
        fixed = refine(materialize(state(RATIO), 9), tokens)
        assert actual.indices.shape == (2, 9) and actual.indices.equal(fixed.indices)

    def test_tiles_count(self) -> None:
        changes: dict[str, object] = {"/budget": {"atom": "per_tile_budget", "k": 3}}
        policy = materialize(state(changes))
        assert policy.tokens_kept(100, 5) == 15 and policy.tokens_kept(100) == 3

    def test_safety_check_passes(self) -> None:
        assert safety_check(materialize(state(RATIO))).valid

    def test_limits_apply_to_the_largest_k_and_r_min_to_the_smallest(self) -> None:
        low: dict[str, object] = {"/budget": {"atom": "ratio_budget", "ceiling": 64, "limit": 63}}
        with pytest.raises(StateError, match="limit 63 is below the state's own K = 64"):
            state(low)
        with pytest.raises(StateError, match="r_min = 5 reference tokens cannot be kept of K = 4"):
            state({**RATIO, "/constraints/selector/r_min": 5})
        with pytest.raises(BudgetError):
            materialize(state({**RATIO, "/constraints/selector/r_min": 4}), 3)
