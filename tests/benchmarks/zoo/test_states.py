from __future__ import annotations

import pytest

from benchmarks.zoo.states import BUDGETS, QUOTAS, SEARCH_RESULTS, SOURCE, Entry, build_states
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.materialize import core_policy
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import synthetic_probes

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


@pytest.mark.parametrize("quota", QUOTAS)
def test_the_quota_sweep_differs_in_its_quota_alone(quota: int) -> None:
    """The selected policy exchanges exactly q_e tokens of every image."""
    source, state = load_state(SOURCE), load_state(f"ablation-quota-{quota}")
    selector = state.constraints.selector.model_copy(update={"q_e": 2})
    constraints = state.constraints.model_copy(update={"selector": selector})
    assert state.model_copy(update={"constraints": constraints}).digest == source.digest
    policy = materialize(state, 32)
    assert (policy.quota, policy.r_min) == (quota, 32 - quota)
    assert set(refine(policy, synthetic_probes(128)[0]).exchanged.tolist()) == {quota}


def test_transferred_states_carry_no_scores_of_other_budgets(entries: list[Entry]) -> None:
    transferred = [entry.state.name for entry in entries if entry.family == "transfer"]
    assert transferred and not any(load_state(name).provenance.scores for name in transferred)


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
