from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import LLAVA, describe, places, refusal, vllm_config
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune import load_state
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.text_tower import SIGN_KEY
from vllm_autoprune.serving.startup.config import resolve_settings
from vllm_autoprune.tpdsl.executor.state_cost import DEFAULT_COST
from vllm_autoprune.tpdsl.states.load import shipped_states

SELECTOR = sample()["constraints"]["selector"]
MISSING = "atom-that-is-not"
TOWER = "--autoprune-text-tower"


@pytest.mark.parametrize("form", ["name", "path", "path as text", "json", "dict", "state"])
def test_a_state_may_be_given_in_every_form(form: str) -> None:
    file = shipped_states()["autoprune"]
    forms: Mapping[str, object] = {
        "name": "autoprune",
        "path": file,
        "path as text": str(file),
        "json": file.read_text(),
        "dict": shipped("autoprune"),
        "state": load_state("autoprune"),
    }
    served_state = resolve_settings({"state": forms[form]}, vllm_config())
    assert served_state.state.digest == load_state("autoprune").digest
    assert (served_state.architecture, served_state.budget, served_state.tower) == (LLAVA, 32, None)
    assert served_state.cache_bytes == 1 << 28


@pytest.mark.parametrize("budget", [64, "64", " 64 "], ids=repr)
def test_a_budget_of_its_own(budget: object) -> None:
    served_state = resolve_settings({"state": "autoprune", "budget": budget}, vllm_config())
    assert served_state.budget == served_state.policy().budget == 64


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 0), ("0", 0), (2, 1 << 31), ("0.5", 1 << 29), (1024, 1 << 40)],
    ids=repr,
)
def test_a_cache_of_its_own(size: object, count: int) -> None:
    served_state = resolve_settings({"state": "autoprune", "feature_cache_gb": size}, vllm_config())
    assert served_state.cache_bytes == count


def test_a_text_tower_of_its_own(tiny_clip: TinyClip) -> None:
    settings = {"state": "autoprune", "text_tower": str(tiny_clip.folder)}
    served_state = resolve_settings(settings, vllm_config())
    assert served_state.tower is not None
    assert (served_state.tower.path, served_state.tower.sign) == (str(tiny_clip.folder), -1)


@pytest.mark.parametrize("settings", ["autoprune", 3, None, ["autoprune"], True], ids=repr)
def test_settings_that_are_not_an_object(settings: object) -> None:
    assert places(settings) == ["additional_config/autoprune"]


def test_unknown_setting() -> None:
    (problem,) = refusal({"state": "autoprune", "buget": 3})
    assert problem.where == "additional_config/autoprune/buget"
    assert "budget" in problem.fix


@pytest.mark.parametrize("settings", [{}, {"from_flags": True}, {"state": None}], ids=repr)
def test_no_state(settings: object) -> None:
    (problem,) = refusal(settings)
    assert problem.where == "--autoprune-state"
    assert "no state is given" in problem.what


def test_a_budget_without_a_state() -> None:
    assert places({"budget": 64}) == ["--autoprune-state"]
    assert places({"budget": "0"}) == ["--autoprune-state", "--autoprune-budget"]


def test_a_missing_file_and_a_misspelt_name() -> None:
    (problem,) = refusal({"state": "autoprun"})
    assert problem.where == "--autoprune-state autoprun"
    assert "no such file" in problem.what
    assert "did you mean 'autoprune'?" in problem.fix


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("state: 3")
    (problem,) = refusal({"state": str(file)})
    assert problem.where == f"--autoprune-state {file}"
    assert "not JSON" in problem.what


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "value", [{1, 2}, nested(100_000), 10**5000, b"bytes"], ids=["set", "deep", "huge", "bytes"]
)
def test_dictionary_that_is_not_json_is_reported(value: object) -> None:
    (problem,) = refusal({"state": {"schema": value}})
    assert problem.where == "" and problem.what.startswith("not JSON: ")


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"/schema": "autoprune-state/9"}, "/schema", "autoprune-state/9"),
        ({"/scoring/fusion/atom": MISSING}, "/scoring/fusion/atom", MISSING),
        ({"/constraints/selector/q_e": -1}, "/constraints/selector/q_e", "-1"),
        ({"/reassembly/strenth": 1}, "/reassembly/strenth", "not a known field"),
    ],
    ids=["version", "atom", "parameter", "field"],
)
def test_a_state_with_a_mistake_is_pointed_at(
    tmp_path: Path, changes: dict[str, object], pointer: str, message: str
) -> None:
    data = edited(sample(), {"/reassembly": {"atom": "mean_residual"}, **changes})
    file = tmp_path / "state.json"
    file.write_text(json.dumps(data))
    (in_file,) = refusal({"state": str(file)})
    assert in_file.where == f"--autoprune-state {file}#{pointer}"
    assert message in in_file.what
    (in_settings,) = refusal({"state": data})
    assert in_settings.where == f"#{pointer}"


@pytest.mark.parametrize("budget", [0, -1, "0", "-1", 65537], ids=repr)
def test_budget_out_of_range(budget: object) -> None:
    (problem,) = refusal({"state": "autoprune", "budget": budget})
    assert problem.where.startswith("--autoprune-budget")
    assert str(budget) in problem.what


@pytest.mark.parametrize("budget", ["x", "1.5", 1.5, "", True, [8]], ids=repr)
def test_budget_that_is_not_an_integer(budget: object) -> None:
    (problem,) = refusal({"state": "autoprune", "budget": budget})
    assert problem.where == "--autoprune-budget"
    assert "not a whole number" in problem.what


def test_a_budget_above_the_state_s_limit() -> None:
    data = edited(sample(), {"/budget": {"atom": "fixed_budget@32", "limit": 48}})
    assert resolve_settings({"state": data, "budget": 48}, vllm_config()).budget == 48
    (problem,) = refusal({"state": data, "budget": 64})
    assert problem.where == "--autoprune-budget#/budget/limit"
    assert "48" in problem.fix


def test_a_budget_below_the_reference_tokens_to_be_kept() -> None:
    data = edited(sample(), {"/constraints/selector/r_min": 24})
    (problem,) = refusal({"state": data, "budget": 16})
    assert problem.where == "--autoprune-budget#/constraints/selector/r_min"
    assert "24" in problem.what and "16" in problem.what


@pytest.mark.parametrize("size", [-1, "-0.1", "nan", float("nan"), "inf", "much", 1025], ids=repr)
def test_invalid_cache_size(size: object) -> None:
    (problem,) = refusal({"state": "autoprune", "feature_cache_gb": size})
    assert problem.where == "--autoprune-feature-cache-gb"


def test_invalid_request_rules() -> None:
    assert places({"state": "autoprune", "requests": "everything"}) == ["--autoprune-requests"]


@pytest.fixture
def towers(tmp_path: Path) -> dict[str, Path]:
    """Text towers with one mistake each."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "siglip"}')
    return {
        "missing": tmp_path / "nowhere",
        "not CLIP": other,
        "no tokenizer": describe(tmp_path / "bare", tokenizer=False),
        "bad sign": describe(tmp_path / "sign", {SIGN_KEY: 2}),
    }


def test_a_text_tower_with_a_mistake(towers: dict[str, Path]) -> None:
    for path in towers.values():
        assert places({"state": "autoprune", "text_tower": str(path)}) == [f"{TOWER} {path}"]


def test_a_text_tower_of_another_vision_tower(tmp_path: Path) -> None:
    folder = describe(tmp_path)
    vision = SimpleNamespace(model_type="clip_vision_model", hidden_size=1024)
    settings = {"state": "autoprune", "text_tower": str(folder)}
    (problem,) = refusal(settings, vllm_config(vision_config=vision))
    assert problem.where == f"{TOWER} {folder}"
    assert "24 wide, the model's 1024" in problem.what


def test_all_problems_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    settings = {
        "state": edited(sample(), {"/schema": 1}),
        "budget": "x",
        "text_tower": str(tmp_path),
        "feature_cache_gb": "x",
        "detail": "low=x",
        "buget": 1,
    }
    assert set(places(settings, vllm_config(architecture="Other"))) == {
        "#/schema",
        "--autoprune-budget",
        f"{TOWER} {tmp_path}",
        "--autoprune-feature-cache-gb",
        "--autoprune-detail",
        "additional_config/autoprune/buget",
        "VLLM_USE_RUST_FRONTEND",
        "model",
    }


def test_cost_limit_of_request_states() -> None:
    assert resolve_settings({"state": "autoprune"}, vllm_config()).rules.cost == DEFAULT_COST
    rules = resolve_settings({"state": "autoprune", "request_cost": "750"}, vllm_config()).rules
    assert (rules.cost, rules.level) == (750.0, "budget")
    for wrong in ("much", 0, -1, "nan", "inf", 1e9):
        settings = {"state": "autoprune", "request_cost": wrong}
        assert places(settings) == ["--autoprune-request-cost"]


def test_budgets_of_details() -> None:
    assert resolve_settings({"state": "autoprune"}, vllm_config()).rules.detail == DetailBudgets()
    for given in ("low=16,high=64", {"low": 16, "high": "64"}):
        for requests in (None, "none", "budget:32-64", "states"):
            settings = {"state": "autoprune", "requests": requests, "detail": given}
            assert resolve_settings(settings, vllm_config()).rules.detail == DetailBudgets(16, 64)


def test_budgets_of_details_respect_the_end_of_the_range() -> None:
    settings = {"state": "autoprune", "requests": "budget:1-64", "detail": "low=65,high=256"}
    low, high = refusal(settings)
    assert {low.where, high.where} == {"--autoprune-detail"}
    assert "low = 65, and --autoprune-requests allows 64 at most" in low.what
    assert "high = 256" in high.what


def test_budgets_of_details_are_possible_with_the_state() -> None:
    fixed = edited(sample(), {"/constraints/selector": {**SELECTOR, "q_e": 2, "r_min": 32}})
    resolve_settings({"state": fixed, "detail": "low=32"}, vllm_config())
    (problem,) = refusal({"state": fixed, "detail": "low=16,high=64"})
    assert problem.where.startswith("--autoprune-detail low#")
    (problem,) = refusal({"state": "autoprune", "detail": "high=99999"})
    assert "high = 99999" in problem.what


def test_recalled_tokens_are_within_the_range_of_requests() -> None:
    assert resolve_settings({"state": "autoprune"}, vllm_config()).rules.recall == 0
    for given in (8, "8", " 8 "):
        chosen = {"state": "autoprune", "recall": given}
        assert resolve_settings(chosen, vllm_config()).rules.recall == 8
    for wrong in ("much", -1, 1.5, 65):
        settings: dict[str, object] = {"state": "autoprune", "requests": "budget:1-64"}
        settings["recall"] = wrong
        assert places(settings) == ["--autoprune-recall"]


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForConditionalGeneration", "InternVLForConditionalGeneration"]
)
def test_recall_is_refused_where_an_image_cannot_be_several_items(architecture: str) -> None:
    config = vllm_config(architecture=architecture)
    (problem,) = refusal({"state": "divprune", "recall": 8}, config)
    assert problem.where == "--autoprune-recall"
    assert "this model" in problem.what
    resolve_settings({"state": "divprune", "recall": 0}, config)
