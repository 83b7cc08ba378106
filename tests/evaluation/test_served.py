"""Cases and questions of a suite on one's own data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from vllm_autoprune import load_state
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.records import MME
from vllm_autoprune.evaluation.served import build_cases, read_questions


def test_each_state_is_compared_with_its_base_policy() -> None:
    states = [load_state(name) for name in ("autoprune", "ablation-quota-4", "visionzip")]
    cases = {case.name: case for case in build_cases(states, [8, 16])}
    per_budget = ("random", "resized", "cdpruner", "autoprune", "ablation-quota-4", "visionzip")
    assert set(cases) == {"full", *(f"{name}@{k}" for name in per_budget for k in (8, 16))}
    assert cases["autoprune@8"].base == cases["ablation-quota-4@8"].base == "cdpruner@8"
    assert cases["visionzip@8"].base == "" and cases["visionzip@8"].arm == "base"
    assert cases["cdpruner@8"].quota == 0 and cases["autoprune@8"].quota == 2
    assert not any(case.refused for case in cases.values())


def test_the_base_policy_alone_has_the_parameters_of_the_state() -> None:
    data = load_state("autoprune").model_dump(mode="json")
    data["base_policy"] = {"name": "fastv", "params": {"layer": 3}}
    cases = {case.name: case for case in build_cases([load_state(data)], [8])}
    state = cases["fastv@8"].pruning["state"]
    assert isinstance(state, dict)
    assert state["base_policy"] == {"name": "fastv", "params": {"layer": 3}}


def test_a_budget_that_a_state_forbids_is_a_refused_case() -> None:
    data = load_state("autoprune").model_dump(mode="json")
    data["budget"] |= {"limit": 64}
    cases = {case.name: case for case in build_cases([load_state(data)], [128])}
    assert "limit" in cases["autoprune@128"].refused and not cases["cdpruner@128"].refused


def test_questions_are_ordered_by_image_and_pairs_are_scored_as_mme(tmp_path: Path) -> None:
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    lines: list[dict[str, object]] = [
        {"image": "a.png", "question": "1?", "answer": "x"},
        {"image": "b.jpg", "question": "2?", "answer": "yes", "category": "colour", "pair": 7},
        {"image": "a.png", "question": "3?", "answer": "y", "category": "shape"},
        {"image": "b.jpg", "question": "4?", "answer": "no", "category": "colour", "pair": 7},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    questions = read_questions(path)
    assert [question.text for question in questions] == ["1?", "3?", "2?", "4?"]
    assert [question.record.benchmark for question in questions] == ["all", "shape", MME, MME]
    assert {q.record.pair for q in questions} == {"", "b.jpg/7"}
    assert questions[0].image.startswith("data:image/png;base64,")
    assert questions[2].image.startswith("data:image/jpeg;base64,")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_questions(path)
