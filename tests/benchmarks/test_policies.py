"""The shipped states are those that are built, and their files carry what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import policies
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE, shipped_states

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


@pytest.mark.parametrize("name", ["cen_divprune", DEFAULT_STATE])
def test_a_state_of_images_has_a_form_that_prunes_videos_too(name: str) -> None:
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


def test_evidence_is_what_the_accuracy_table_says_of_the_same_state() -> None:
    state = load_state("cen_divprune")
    rows = policies._read_evidence(state)["rows"]
    assert [row["budget"] for row in rows] == 4 * ["N/2", "N/4", "N/8", "N/16"]
    found = {(row["model"].partition(" ")[0], row["budget"]): row for row in rows}
    llava = found["mini-LLaVA", "N/8"]
    assert (llava["questions"], llava["accuracy"], llava["resized"]) == (
        1812,
        87.97,
        57.51,
    )
    qwen = found["mini-Qwen3-VL", "N/8"]
    assert (qwen["questions"], qwen["accuracy"]) == (1037, 57.86)
    assert qwen["less_resized"] == {"value": 20.73, "low": 16.71, "high": 25.1}
    assert state.provenance.scores == {"rows": rows}
    other = state.model_copy(update={"positions": "packed"})
    assert policies._read_evidence(other) == {}, "measured of another state"
