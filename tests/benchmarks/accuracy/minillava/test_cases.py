from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from benchmarks.accuracy.minillava.cases import BUDGETS, FAMILIES, build_cases
from benchmarks.yardsticks.minillava import EQUAL_POLICIES, MiniLlava
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.run import residual_on
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state


def test_the_paper_s_tables_by_default() -> None:
    cases = build_cases(144, BUDGETS, FAMILIES)
    assert Counter(case.arm for case in cases) == {
        "full": 1, "random": 5, "resized": 5, "base": 80, "autoprune": 80, "found": 10,
        "quota": 29,
    }  # fmt: skip
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and names[0] == "full"
    assert all(case.base in names for case in cases if case.base)
    assert not any(case.refused for case in cases)
    quotas = {case.quota for case in cases if case.arm == "quota"}
    ours = {case.quota for case in cases if case.arm == "autoprune"}
    assert quotas == {0, 1, 2, 4, 8, 16, 32} and ours == {2}


def test_the_residual_is_the_shipped_one_on_every_base_policy() -> None:
    source = load_state("autoprune")
    for policy in BASE_POLICIES:
        state = residual_on(policy)
        assert state.base_policy.name == policy
        assert (state.scoring, state.constraints) == (source.scoring, source.constraints)
    assert residual_on("cdpruner").digest == source.digest


def test_ablations_include_their_base_policy() -> None:
    names = [case.name for case in build_cases(144, [8], ["quota"])]
    assert names == ["full", "cdpruner@8", "cdpruner+autoprune@8",
                     *(f"quota-{quota}@8" for quota in (0, 1, 2, 4, 8))]  # fmt: skip


def test_one_token_is_served_without_exchanges() -> None:
    """With q_e = 2 and K = 1 the quota shrinks; no case is skipped silently."""
    cases = build_cases(144, [1], ["policies"])
    assert len(cases) == 1 + 2 * (len(BASE_POLICIES) - len(EQUAL_POLICIES))


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick = MiniLlava()
    tokens = yardstick.encode(yardstick.draw("test", 1)).tokens
    kept = {}
    for case in build_cases(144, [18], ["policies"]):
        if case.arm == "base":
            policy = BASE_POLICIES[case.label]
            picks = policy.select(policy.default_params, tokens, 18).picks.sort(1).values
            kept[case.label] = tuple(picks.flatten().tolist())
    copies = [pair for pair in combinations(kept, 2) if kept[pair[0]] == kept[pair[1]]]
    assert copies == [] and len(kept) > 10


def test_a_budget_that_prunes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--budgets 144 0: are not within 1..143"):
        build_cases(144, [8, 144, 0], FAMILIES)
