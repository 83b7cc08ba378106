from __future__ import annotations

import pytest

from benchmarks.zoo.states import BUDGETS, QUOTAS, SEARCH_RESULTS, SOURCE, Entry, build_states
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.executor.materialize import core_policy
from vllm_autoprune.tpdsl.states.load import shipped_states

SHIPPED = shipped_states()


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return build_states(load_state(SOURCE), [load_state(name) for name in SEARCH_RESULTS])


def test_the_shipped_states_are_the_ones_that_are_built(entries: list[Entry]) -> None:
    built = {entry.state.name: entry.state.digest for entry in entries}
    assert {name: load_state(name).digest for name in SHIPPED} == built
    assert all(load_state(name).name == name for name in SHIPPED)


def test_every_budget_and_backbone_of_the_paper_is_there(entries: list[Entry]) -> None:
    transferred = [entry.state for entry in entries if entry.family == "transfer"]
    assert sorted(materialize(state).budget for state in transferred) == sorted(
        k for budgets in BUDGETS.values() for k in budgets
    )
    source = load_state(SOURCE)
    for state in transferred:
        assert state.scoring == source.scoring and state.constraints == source.constraints
        policy = materialize(state)
        assert (policy.quota, policy.r_min) == (2, policy.budget - 2)


def test_a_base_policy_alone_exchanges_nothing_and_reads_no_signal() -> None:
    for name, policy in BASE_POLICIES.items():
        alone = materialize(load_state(name), 16)
        assert alone.base.name == name and not alone.refines
        assert alone.needs == policy.needs_of(policy.default_params)


def test_the_quota_sweep_has_its_exchange_quotas() -> None:
    names = {q: f"ablation-quota-{q}" if q != 2 else SOURCE for q in QUOTAS}
    for quota, name in names.items():
        policy = materialize(load_state(name), 32)
        assert (policy.quota, policy.r_min) == (quota, 32 - quota)


def test_ablations_remove_one_component() -> None:
    source = load_state(SOURCE)
    free = materialize(load_state("ablation-without-anchoring"))
    assert (free.quota, free.r_min) == (32, 0)
    assert len(load_state("ablation-without-fusion").scoring.signals) == 1
    similar = load_state("ablation-without-diversity")
    assert [call.atom for call in similar.constraints.pool] == ["quality_pool_builder"]
    assert similar.scoring == source.scoring


def test_the_instruction_free_state_reads_no_instruction() -> None:
    assert not materialize(load_state("instruction-free")).reads_instruction


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_state_names_its_origin(name: str) -> None:
    assert load_state(name).provenance.found_by


@pytest.mark.parametrize("name", ["minillava-split", "shared-core"])
def test_half_of_a_shared_core_reads_no_question(name: str) -> None:
    policy = materialize(load_state(name), 16)
    assert policy.core == 8 and policy.reads_instruction
    assert core_policy(policy.state, 8).needs.isdisjoint({"instruction", "language"})
