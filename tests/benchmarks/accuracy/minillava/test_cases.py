from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.accuracy.minillava.cases import BUDGETS, FAMILIES, cases, residual_on
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.states.load import load_state


def test_the_paper_s_tables_by_default() -> None:
    found = cases(144, BUDGETS, FAMILIES)
    assert Counter(case.arm for case in found) == {
        "full": 1, "random": 5, "base": 45, "autoprune": 45, "found": 5, "component": 15,
        "quota": 15,
    }  # fmt: skip
    names = [case.name for case in found]
    assert len(set(names)) == len(names) and names[0] == "full"
    assert all(case.base in names for case in found if case.base)
    assert not any(case.refused for case in found)
    quotas = {case.quota for case in found if case.arm == "quota"}
    ours = {case.quota for case in found if case.arm == "autoprune"}
    assert quotas == {0, 1, 4} and ours == {2}


def test_the_residual_is_the_shipped_one_on_every_base_policy() -> None:
    source = load_state("autoprune")
    for policy in BASE_POLICIES:
        state = residual_on(policy)
        assert state.base_policy.name == policy
        assert (state.scoring, state.constraints) == (source.scoring, source.constraints)
    assert residual_on("cdpruner").digest == source.digest


def test_ablations_bring_what_they_are_compared_with() -> None:
    names = [case.name for case in cases(144, [8], ["quota"])]
    assert names == ["full", "cdpruner@8", "cdpruner+autoprune@8",
                     "quota-0@8", "quota-1@8", "quota-4@8"]  # fmt: skip


def test_one_token_leaves_nothing_to_exchange_but_is_served() -> None:
    """q_e = 2 of K = 1: the quota shrinks, and nothing is skipped silently."""
    found = cases(144, [1], ["policies"])
    assert len(found) == 1 + 2 * len(BASE_POLICIES)


def test_a_budget_that_is_no_pruning_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--budgets 144 0: are not within 1..143"):
        cases(144, [8, 144, 0], FAMILIES)
