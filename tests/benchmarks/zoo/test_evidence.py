from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.zoo.evidence import (
    Evidence,
    Row,
    as_markdown,
    format_json,
    read_evidence,
    with_evidence,
    write_state,
)
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.loading import shipped_states

EVIDENCE = Evidence(
    model="mini",
    questions=5,
    behaviour="ab",
    rows=(Row(budget=8, accuracy=99.5, accuracy_plus=98.0, prompt_tokens=23.0),),
)


LESS = Estimate(59.5, 50.0, 70.0)
WITH_RESIZED = EVIDENCE.model_copy(
    update={"rows": (EVIDENCE.rows[0].model_copy(update={"resized": 40.0, "less_resized": LESS}),)}
)


@pytest.mark.parametrize("evidence", [EVIDENCE, WITH_RESIZED])
@pytest.mark.parametrize("name", ["autoprune", "visionzip", "ablation-quota-8"])
def test_a_written_state_loads_back(name: str, evidence: Evidence, tmp_path: Path) -> None:
    state = with_evidence(load_state(name), evidence)
    write_state(state, tmp_path / "state.json")
    back = load_state(tmp_path / "state.json")
    assert back == state and back.digest == load_state(name).digest
    assert read_evidence(back) == evidence


def test_lines_are_short_enough_to_read_unless_a_text_is_long(tmp_path: Path) -> None:
    write_state(load_state("autoprune"), tmp_path / "state.json")
    lines = (tmp_path / "state.json").read_text().splitlines()
    texts = ('"found_by"', '"evaluated_on"', '"notes"')
    assert all(len(line) <= 100 for line in lines if not line.strip().startswith(texts))
    assert any(line.strip().startswith('{"atom": "spatial_centrality_prior"') for line in lines)


@pytest.mark.parametrize("value", [{}, [], {"a": []}, {"a": {"b": [1, "\u00e4", None]}}, [[1], {}]])
def test_formatting_keeps_the_value(value: object) -> None:
    assert json.loads(format_json(value)) == value  # type: ignore[arg-type]


def test_scores_of_another_schema_are_ignored() -> None:
    state: PruningState = load_state("autoprune")
    other = state.provenance.model_copy(update={"scores": {"mme": 1.0}})
    assert read_evidence(state.model_copy(update={"provenance": other})) is None


PAGE = Path(__file__).resolve().parents[3] / "docs" / "shipped-states.md"


def test_the_page_shows_the_evidence_that_states_carry() -> None:
    assert as_markdown().rstrip() in PAGE.read_text(encoding="utf-8"), (
        "run: python scripts/readme.py"
    )


def test_the_table_names_every_shipped_state() -> None:
    table = as_markdown()
    assert all(f"`{name}`" in table for name in shipped_states())


def test_the_control_is_a_row_of_the_table_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.zoo import evidence

    monkeypatch.setattr(evidence, "read_evidence", lambda state: WITH_RESIZED)
    assert "| resize control | no policy: all tokens pooled to K cells | 40.0 |" in as_markdown()
