from __future__ import annotations

from typing import Any

import pytest

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import state
from vllm_autoprune import BudgetError, materialize
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

SELECTOR = "reference_residual_exchange_selector"
DIVPRUNE = {"/base_policy": {"name": "divprune"}}
BLIND = {"/scoring/signals": [{"atom": "spatial_centrality_prior"}]}
SILENT = {f"/scoring/signals/{i}/weight": 0.0 for i in range(5)}
FIXED = {"/constraints/selector/q_e": 0}


def test_default_budget_is_the_state_s_own() -> None:
    policy = materialize(state())
    assert (policy.budget, policy.quota, policy.r_min) == (32, 2, 30)


@pytest.mark.parametrize(
    ("budget", "quota", "r_min"), [(1, 1, 0), (2, 2, 0), (3, 2, 1), (640, 2, 638)]
)
def test_another_budget_changes_only_dependent_fields(budget: int, quota: int, r_min: int) -> None:
    policy = materialize(state(), budget)
    assert (policy.budget, policy.quota, policy.r_min) == (budget, quota, r_min)
    assert policy.state == state()


def test_a_quota_larger_than_the_budget_replaces_everything_at_most() -> None:
    policy = materialize(state({"/constraints/selector/q_e": 100}), 8)
    assert (policy.quota, policy.r_min) == (8, 0)


def test_r_min_that_the_state_sets_holds_at_every_budget() -> None:
    chosen = state({"/constraints/selector": {"atom": SELECTOR, "q_e": 30, "r_min": 10}})
    assert [materialize(chosen, k).quota for k in (10, 12, 40, 64)] == [0, 2, 30, 30]
    assert {materialize(chosen, k).r_min for k in (10, 12, 40, 64)} == {10}


@pytest.mark.parametrize("budget", [0, -1, True, False, 1.5, 32.0, "32", MAX_BUDGET + 1])
def test_a_budget_is_a_whole_number_of_tokens(budget: Any) -> None:
    with pytest.raises(BudgetError) as raised:
        materialize(state(), budget)
    (problem,) = raised.value.problems
    assert problem.where == "/budget" and repr(budget) in problem.what
    assert problem.fix == "give a whole number from 1 to 65536"


@pytest.mark.parametrize(
    ("changes", "budget", "where", "fix"),
    [
        ({"/budget/limit": 64}, 65, "/budget/limit", "use 64 or less"),
        (
            {"/constraints/selector/r_min": 20},
            19,
            "/constraints/selector/r_min",
            "set it to null, which means K - q_e, or use a larger K",
        ),
    ],
)
def test_budget_error_has_pointer_and_fix(
    changes: dict[str, object], budget: int, where: str, fix: str
) -> None:
    with pytest.raises(BudgetError, match="'sample'") as raised:
        materialize(state(changes), budget)
    (problem,) = raised.value.problems
    assert (problem.where, problem.fix) == (where, fix)


def test_limits_are_inclusive() -> None:
    chosen = state({"/budget/limit": 64, "/constraints/selector/r_min": 16})
    assert [materialize(chosen, k).budget for k in (16, 64)] == [16, 64]
    assert materialize(state(), MAX_BUDGET).budget == MAX_BUDGET


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {"instruction", "cls_attention"}),
        (FIXED, {"instruction"}),  # without exchange only the base policy reads anything
        (SILENT, {"instruction"}),
        (DIVPRUNE, {"instruction", "cls_attention"}),
        ({**DIVPRUNE, "/scoring/signals/0/weight": 0.0}, {"cls_attention"}),
        ({**DIVPRUNE, "/scoring/signals/1/weight": 0.0}, {"instruction"}),
        ({**DIVPRUNE, **BLIND}, set()),
        ({**DIVPRUNE, **SILENT}, set()),
        ({**DIVPRUNE, **FIXED}, set()),
    ],
)
def test_a_policy_needs_what_it_reads(changes: dict[str, object], needs: set[str]) -> None:
    policy = materialize(state(changes))
    assert policy.needs == needs
    assert policy.reads_instruction == ("instruction" in needs)


def test_r_min_equal_to_the_budget_serves_the_base_policy() -> None:
    chosen = state({**DIVPRUNE, "/constraints/selector/r_min": 32})
    assert not materialize(chosen).refines and not materialize(chosen).reads_instruction
    assert materialize(chosen, 33).refines and materialize(chosen, 33).reads_instruction


@means("fallback_to_selection")
def test_fallback_requires_the_atom_in_the_state() -> None:
    assert materialize(state()).falls_back
    assert not materialize(state({"/safety": ["preserve_budget"]})).falls_back


@pytest.mark.parametrize(("tokens", "kept"), [(576, 32), (33, 32), (32, 32), (31, 31), (1, 1)])
def test_tokens_kept_never_exceed_n(tokens: int, kept: int) -> None:
    assert materialize(state()).tokens_kept(tokens) == kept
