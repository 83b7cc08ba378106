from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.zoo.states import BUDGETS, QUOTAS, SEARCH_RESULTS, SOURCE, Entry, build_states
from offline_search.candidates.ablation import state_components
from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.executor.materialize import core_policy
from vllm_autoprune.tpdsl.executor.probes import synthetic_probes
from vllm_autoprune.tpdsl.executor.refine import refine
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


@pytest.mark.parametrize("quota", QUOTAS)
def test_the_quota_sweep_exchanges_up_to_its_quota(quota: int) -> None:
    state = load_state(f"ablation-quota-{quota}")
    policy = materialize(state, 32)
    assert (policy.quota, policy.r_min) == (quota, 32 - quota)
    assert _exchanged(state, 32) == quota


def _exchanged(state: PruningState, budget: int) -> int:
    """Exchanges on images where every token outside the reference selection is better."""
    data = state.model_dump(mode="json")
    data["base_policy"] = {"name": "divprune", "params": {}}
    data["scoring"]["signals"] = [{"atom": "attention_proxy_saliency", "weight": 1.0}]
    policy = materialize(load_state(data), budget)
    images = synthetic_probes(4 * budget)[0]
    picks = refine(policy, images).reference
    attention = torch.ones(images.batch, images.count).scatter(1, picks, 0.0)
    return int(refine(policy, replace(images, cls_attention=attention)).exchanged.min())


def test_the_ablations_of_components_remove_one_each() -> None:
    assert state_components(load_state(SOURCE), 32) == {"anchoring", "fusion", "diversity"}
    for component in ("anchoring", "fusion", "diversity"):
        state = load_state(f"ablation-without-{component}")
        present = state_components(state, 32)
        assert present == {"anchoring", "fusion", "diversity"} - {component}
    source = load_state(SOURCE)
    assert load_state("ablation-without-anchoring").constraints.pool == source.constraints.pool


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
