"""The shipped states are those that are built, and their files carry what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import policies
from vllm_autoprune import load_state, materialize
from vllm_autoprune.cli.commands.states import RECOMMENDED
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import shipped_states

PAGE = Path(__file__).resolve().parents[2] / "docs" / "shipped-states.md"


def test_building_again_changes_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    shutil.copytree(policies.POLICIES, folder)
    (folder / "gone.json").write_text("{}")
    derived = set(shipped_states()) - {policies.SOURCE, *policies.SEARCH_RESULTS}
    for name in derived:
        state = json.loads((folder / f"{name}.json").read_text())
        # Built anew where a rule of `build` has changed; the evidence is in the file.
        (folder / f"{name}.json").write_text(
            json.dumps(state | {"safety": state["safety"][:3]})
        )
    policies._build(folder)
    built = {path.name: path.read_text() for path in folder.iterdir()}
    assert built == {
        path.name: path.read_text() for path in policies.POLICIES.glob("*.json")
    }
    assert all(load_state(name).provenance.found_by for name in shipped_states())


@pytest.mark.parametrize("name", ["minillava-split", "shared-core"])
def test_half_of_a_shared_core_reads_no_question(name: str) -> None:
    policy = materialize(load_state(name), 16)
    assert policy.core == 8 and policy.reads_instruction
    assert materialize(policy.state, 8, part="core").needs.isdisjoint(
        {"instruction", "language"}
    )
    assert not materialize(load_state("instruction-free")).reads_instruction


@pytest.mark.parametrize("name", sorted({*RECOMMENDED.values()}))
def test_a_default_state_has_a_form_that_prunes_videos_too(name: str) -> None:
    apart = {"name": name, "provenance": load_state(name).provenance, "frames": None}
    videos = load_state(f"{name}-video")
    assert videos.model_copy(update=apart).digest == load_state(name).digest
    budget = BudgetCall.parse("1/4", video=True)
    assert materialize(videos, budget, video=True).at(8 * 36, 8).budget == 2 * 36


def test_the_page_shows_the_evidence_that_states_carry() -> None:
    table = policies.as_markdown()
    assert table.rstrip() in PAGE.read_text(encoding="utf-8"), (
        "run: python scripts/readme.py"
    )
    assert all(f"`{name}`" in table for name in shipped_states())


def test_a_report_of_eval_becomes_evidence_outside_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    shutil.copytree(policies.POLICIES, folder)
    gain = {"value": 40.001, "low": 30.0, "high": 50.0}
    figures = {
        "accuracy": gain,
        "accuracy_plus": 25.0,
        "prompt_tokens": 36.04,
        "to_resized": {"accuracy": gain},
    }
    names = (
        "resized@16",
        "visionzip@16",
        "miniqwen@16",
        "autoprune-llava-1.5-7b-k16@16",
    )
    rows = [{"case": {"name": name}, **figures} for name in names]
    policies._measure(folder, {"questions": 9, "rows": rows})
    state = load_state(folder / "visionzip.json")
    assert state.digest == load_state("visionzip").digest
    expected = {
        "budget": 16,
        "accuracy": 40.0,
        "accuracy_plus": 25.0,
        "prompt_tokens": 36.0,
        "resized": 40.0,
        "less_resized": {"value": 40.0, "low": 30.0, "high": 50.0},
    }
    assert policies._read_evidence(folder / "visionzip.json")["rows"] == [expected]
    assert "policies measure" in (state.provenance.evaluated_on or "")
    changed = [
        path.name
        for path in folder.glob("*.json")
        if path.read_text() != (policies.POLICIES / path.name).read_text()
    ]
    assert changed == ["visionzip.json"], "other models have other evidence"
