from __future__ import annotations

from fractions import Fraction

from benchmarks.accuracy.yardsticks.cases import build_cases
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

EIGHTH = Budget("K = N/8", Fraction(1, 8))


def test_a_fixed_grid_has_every_base_policy_and_its_own_budgets() -> None:
    names = {case.name for case in build_cases(MiniLlava.budgets, MiniLlava.available)}
    assert {*BASE_POLICIES, "full", "resized", "random", "oracle", "minillava"} <= names
    assert [budget.tokens(144) for budget in MiniLlava.budgets] == [72, 36, 18, 9]
    assert MiniLlava.eighth == "K = 18"


def test_qwen_has_the_policies_whose_inputs_its_server_provides() -> None:
    names = {case.name for case in build_cases(MiniQwen.budgets, MiniQwen.available)}
    assert {"cdpruner", "divprune", "mmtok", "holov", "autoprune"} <= names
    assert not {"visionzip", "trim", "prumerge_plus", "fastv", "dart", "sparsevlm"} & names


def test_a_share_of_the_tokens_is_rounded_down_and_at_least_one() -> None:
    assert [EIGHTH.tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]


def test_named_cases_keep_what_they_are_compared_with() -> None:
    cases = build_cases([EIGHTH], MiniQwen.available, ["divprune"])
    assert [case.name for case in cases] == ["full", "resized", "divprune"]
    assert cases[2].reads_question is False and cases[1].reads_question is None


def test_the_key_of_a_state_changes_with_its_digest() -> None:
    (case,) = [one for one in build_cases([EIGHTH], MiniQwen.available) if one.name == "autoprune"]
    assert case.state is not None and case.state.digest[:12] in case.key
    assert case.base == "cdpruner" and case.reads_question


def test_states_also_rank_before_the_merger_where_there_is_one() -> None:
    names = {case.name: case for case in build_cases([EIGHTH], MiniQwen.available)}
    before = names["divprune@merger_in"]
    assert before.state is not None and before.state.rank_at == "merger_in"
    assert before.base == "divprune", "the paired interval is that of before against after"
    assert before.key != names["divprune"].key
    assert "autoprune@merger_in" in names
    assert not {"scope@merger_in", "mmtok@merger_in", "prunesid@merger_in", "holov@merger_in"} & {
        *names
    }
    assert not [
        case
        for case in build_cases([EIGHTH], MiniLlava.available)
        if case.name.endswith("@merger_in")
    ]


def test_any_shipped_state_can_be_named() -> None:
    names = ["cdpruner", "ablation-quota-8"]
    cases = build_cases([EIGHTH], MiniLlava.available, names)
    assert [case.name for case in cases] == ["full", "resized", *names]
    assert cases[3].base == "cdpruner"
    assert "ablation-quota-8" not in {c.name for c in build_cases([EIGHTH], MiniLlava.available)}
