"""The shipped states are those that are built, and their files carry what was measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.yardsticks.examples import draw_examples
from vllm_autoprune import load_state, materialize
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.materialize import core_policy
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import synthetic_probes

SHIPPED = shipped_states()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "shipped-states.md"
EVIDENCE = policies.Evidence(
    model="mini",
    questions=5,
    behaviour="ab",
    rows=(policies.Row(budget=8, accuracy=99.5, accuracy_plus=98.0, prompt_tokens=23.0),),
)
LESS = Estimate(59.5, 50.0, 70.0)
WITH_RESIZED = EVIDENCE.model_copy(
    update={"rows": (EVIDENCE.rows[0].model_copy(update={"resized": 40.0, "less_resized": LESS}),)}
)


def test_building_again_changes_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    shutil.copytree(policies.POLICIES, folder)
    (folder / "gone.json").write_text("{}")
    policies.build(folder)
    built = {path.name: path.read_text() for path in folder.iterdir()}
    shipped = {path.name: path.read_text() for path in policies.POLICIES.glob("*.json")}
    # A search wrote this file, with "54.0" for 54.
    assert load_state(folder / "miniqwen.json") == load_state("miniqwen")
    assert built | {"miniqwen.json": ""} == shipped | {"miniqwen.json": ""}
    for name in SHIPPED:
        state = load_state(name)
        assert state.name == name and state.provenance.found_by


def test_every_budget_and_backbone_of_the_paper_is_there() -> None:
    entries = policies.build_states()
    transferred = [load_state(e.state.name) for e in entries if e.family == "transfer"]
    budgets = sorted(k for budgets in policies.BUDGETS.values() for k in budgets)
    assert sorted(materialize(state).budget for state in transferred) == budgets
    source = load_state(policies.SOURCE)
    for state in transferred:
        assert state.scoring == source.scoring and state.constraints == source.constraints
        policy = materialize(state)
        assert (policy.quota, policy.r_min) == (2, policy.budget - 2)
        assert not state.provenance.scores, "they would be of other budgets"


def test_a_base_policy_alone_exchanges_nothing_and_reads_no_signal() -> None:
    for name, policy in BASE_POLICIES.items():
        alone = materialize(load_state(name), 16)
        assert alone.base.name == name and not alone.refines
        assert alone.needs == policy.needs_of(policy.default_params)


@pytest.mark.parametrize("quota", policies.QUOTAS)
def test_the_quota_sweep_differs_in_its_quota_alone(quota: int) -> None:
    """The selected policy exchanges exactly q_e tokens of every image."""
    source, state = load_state(policies.SOURCE), load_state(f"ablation-quota-{quota}")
    selector = state.constraints.selector.model_copy(update={"q_e": 2})
    constraints = state.constraints.model_copy(update={"selector": selector})
    assert state.model_copy(update={"constraints": constraints}).digest == source.digest
    policy = materialize(state, 32)
    assert (policy.quota, policy.r_min) == (quota, 32 - quota)
    assert set(refine(policy, synthetic_probes(128)[0]).exchanged.tolist()) == {quota}


@pytest.mark.parametrize("name", ["minillava-split", "shared-core"])
def test_half_of_a_shared_core_reads_no_question(name: str) -> None:
    policy = materialize(load_state(name), 16)
    assert policy.core == 8 and policy.reads_instruction
    assert core_policy(policy.state, 8).needs.isdisjoint({"instruction", "language"})
    assert not materialize(load_state("instruction-free")).reads_instruction


@pytest.mark.parametrize("evidence", [EVIDENCE, WITH_RESIZED])
def test_a_written_state_loads_back(evidence: policies.Evidence, tmp_path: Path) -> None:
    state = load_state("visionzip")
    policies.write_state(state, tmp_path / "state.json", evidence)
    back = load_state(tmp_path / "state.json")
    assert back.digest == state.digest
    assert policies.read_evidence(back) == evidence
    other = state.provenance.model_copy(update={"scores": {"mme": 1.0}})
    assert policies.read_evidence(state.model_copy(update={"provenance": other})) is None


def test_the_page_shows_the_evidence_that_states_carry() -> None:
    table = policies.as_markdown()
    assert table.rstrip() in PAGE.read_text(encoding="utf-8"), "run: python scripts/readme.py"
    assert all(f"`{name}`" in table for name in SHIPPED)


def test_rows_are_paired_with_the_resize_control() -> None:
    examples = draw_examples("test", 2)
    count = len(examples)
    right, half = [True] * count, [number % 2 == 0 for number in range(count)]
    (row,) = policies.build_rows(examples, [(8, right, 22.8)], [(8, half, 22.8)])
    assert (row.budget, row.accuracy, row.accuracy_plus, row.prompt_tokens) == (8, 100, 100, 22.8)
    assert row.resized == round(100 * sum(half) / count, 2)
    assert row.less_resized is not None
    assert row.less_resized.value == round(100 - 100 * sum(half) / count, 2)
    assert row.less_resized.low <= row.less_resized.value <= row.less_resized.high
