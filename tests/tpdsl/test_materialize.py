"""How a state is resolved at a budget, and what the policy then needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import Changes, call, state
from vllm_autoprune import BudgetError, StateError, materialize
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.tokens import split_over_tiles

EXCHANGE = "reference_residual_exchange_selector"


@pytest.mark.parametrize(
    ("name", "parameters", "budget", "expected"),
    [
        (EXCHANGE, {"q_e": 2}, 32, (2, 30)),
        (EXCHANGE, {"q_e": 0}, 32, (0, 32)),
        (EXCHANGE, {"q_e": 40}, 32, (32, 0)),  # the quota is larger than K
        (EXCHANGE, {"q_e": 2}, 1, (1, 0)),
        (EXCHANGE, {"q_e": 2, "r_min": 10}, 32, (2, 10)),  # more room than the quota uses
        (EXCHANGE, {"q_e": 20, "r_min": 30}, 32, (2, 30)),  # less
        (EXCHANGE, {"q_e": 5, "r_min": 40}, 32, (0, 32)),
        ("reference_strict_preservation_selector", {}, 32, (0, 32)),
        ("quality_topk_selector", {}, 1000, (1000, 0)),
    ],
)
def test_the_quota_is_what_r_min_leaves(
    name: str, parameters: Changes, budget: int, expected: tuple[int, int]
) -> None:
    assert call(name, **parameters).bounds(budget) == expected


@given(budget=st.integers(1, 5000), tiles=st.integers(1, 40))
def test_shares_of_tiles_add_up_and_differ_by_one_at_most(budget: int, tiles: int) -> None:
    shares = split_over_tiles(budget, tiles)
    assert len(shares) == tiles and sum(shares) == budget
    assert shares[0] - shares[-1] <= 1 and list(shares) == sorted(shares, reverse=True)


RATIO: Changes = {"/budget": {"atom": "ratio_budget", "ratio": 0.25, "floor": 4, "ceiling": 64}}


def test_a_budget_that_follows_the_image_is_resolved_for_its_size() -> None:
    policy = materialize(state(RATIO))
    assert (policy.varies, policy.budget) == (True, 64)
    assert policy.at(100) == materialize(state(RATIO), 25)
    assert [policy.tokens_kept(n) for n in (3, 8, 100, 5000)] == [3, 4, 25, 64]
    fixed = materialize(state(RATIO), 10)
    assert not fixed.varies and fixed.at(576) is fixed and fixed.tokens_kept(576) == 10
    tiled = materialize(state({"/budget": {"atom": "per_tile_budget", "k": 3}}))
    assert tiled.tokens_kept(100, 5) == 15 and tiled.tokens_kept(100) == 3


def test_limits_apply_to_the_largest_k_and_r_min_to_the_smallest() -> None:
    with pytest.raises(StateError, match="limit 63 is below the state's own K = 64"):
        state({"/budget": {"atom": "ratio_budget", "ceiling": 64, "limit": 63}})
    with pytest.raises(StateError, match="r_min = 5 reference tokens cannot be kept of K = 4"):
        state({**RATIO, "/constraints/selector/r_min": 5})
    chosen = state({"/budget/limit": 64, "/constraints/selector/r_min": 16})
    assert [materialize(chosen, k).budget for k in (16, 64)] == [16, 64]
    assert materialize(state(), MAX_BUDGET).budget == MAX_BUDGET


@pytest.mark.parametrize(
    ("changes", "budget", "where", "fix"),
    [
        *(({}, budget, "/budget", "give a whole number from 1 to 65536")
          for budget in (0, -1, True, False, 1.5, 32.0, "32", MAX_BUDGET + 1)),
        ({"/budget/limit": 64}, 65, "/budget/limit", "use 64 or less"),
        ({"/constraints/selector/r_min": 20}, 19, "/constraints/selector/r_min",
         "set it to null, which means K - q_e, or use a larger K"),
    ],
)  # fmt: skip
def test_a_budget_that_is_refused(changes: Changes, budget: Any, where: str, fix: str) -> None:
    with pytest.raises(BudgetError, match="'sample'") as raised:
        materialize(state(changes), budget)
    (problem,) = raised.value.problems
    assert (problem.where, problem.fix) == (where, fix)
    assert repr(budget) in problem.what


BY_DIVPRUNE = {"/base_policy": {"name": "divprune"}}
SILENT = {f"/scoring/signals/{i}/weight": 0.0 for i in range(5)}
FIXED = {"/constraints/selector/q_e": 0}


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {"instruction", "cls_attention"}),
        (FIXED, {"instruction"}),  # without exchange only the base policy reads anything
        (SILENT, {"instruction"}),
        (BY_DIVPRUNE, {"instruction", "cls_attention"}),
        ({**BY_DIVPRUNE, "/scoring/signals/0/weight": 0.0}, {"cls_attention"}),
        ({**BY_DIVPRUNE, "/scoring/signals/1/weight": 0.0}, {"instruction"}),
        ({**BY_DIVPRUNE, **SILENT}, set()),
        ({**BY_DIVPRUNE, **FIXED}, set()),
        ({"/rank_at": "merger_in"}, {"instruction", "cls_attention", "encoder", "merger_input"}),
        ({"/core": {"share": 1.0}}, set()),
        ({"/core": {"share": 1.0}, "/rank_at": "merger_in"}, {"encoder", "merger_input"}),
    ],
)
def test_a_policy_needs_what_it_reads(changes: Changes, needs: set[str]) -> None:
    policy = materialize(state(changes))
    assert policy.needs == needs
    assert policy.reads_instruction == ("instruction" in needs)
