"""Settings of a server: read, checked, described."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import (
    LLAVA,
    SEGMENT,
    VISION_WIDTH,
    WIDTH,
    add_tokenizer,
    describe,
    places,
    refusal,
    served,
    vllm_config,
)
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune import ConfigError, load_state
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.api.endpoint import describe_as_json, format_summary
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.settings import (
    SIGN_KEY,
    DetailBudgets,
    RequestRules,
    TextTower,
    read_text_tower,
)
from vllm_autoprune.serving.startup import resolve_settings
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import shipped_states

SELECTOR = sample()["constraints"]["selector"]
MISSING = "atom-that-is-not"
TOWER_FLAG = "--autoprune-text-tower"


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
        assert places({"state": "autoprune", "text_tower": str(path)}) == [f"{TOWER_FLAG} {path}"]


def test_a_text_tower_of_another_vision_tower(tmp_path: Path) -> None:
    folder = describe(tmp_path)
    vision = SimpleNamespace(model_type="clip_vision_model", hidden_size=1024)
    settings = {"state": "autoprune", "text_tower": str(folder)}
    (problem,) = refusal(settings, vllm_config(vision_config=vision))
    assert problem.where == f"{TOWER_FLAG} {folder}"
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
        f"{TOWER_FLAG} {tmp_path}",
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


# ---- test_text_tower ----


def refused(path: Path | str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_text_tower(str(path))
    (problem,) = caught.value.problems
    assert problem.where == f"--autoprune-text-tower {path}"
    assert problem.fix
    return problem


def test_a_checkpoint_is_described(tiny_clip: TinyClip) -> None:
    tower = read_text_tower(str(tiny_clip.folder))
    assert (tower.path, tower.segment) == (str(tiny_clip.folder), SEGMENT)
    assert (tower.width, tower.vision_width) == (WIDTH, VISION_WIDTH)


@pytest.mark.parametrize(
    ("stated", "sign", "because"),
    [
        ({}, -1, "states no direction"),
        ({SIGN_KEY: None}, -1, "states no direction"),
        ({SIGN_KEY: 1}, 1, SIGN_KEY),
        ({SIGN_KEY: -1}, -1, SIGN_KEY),
        ({SIGN_KEY: 1.0}, 1, SIGN_KEY),
    ],
)
def test_the_sign_comes_with_its_reason(
    tmp_path: Path, stated: dict[str, object], sign: int, because: str
) -> None:
    tower = read_text_tower(str(describe(tmp_path, stated)))
    assert tower.sign == sign
    assert type(tower.sign) is int
    assert because in tower.reason


@pytest.mark.parametrize("sign", [0, 2, "1", "-1", [1], True, 0.5], ids=repr)
def test_invalid_sign_is_refused(tmp_path: Path, sign: object) -> None:
    problem = refused(describe(tmp_path, {SIGN_KEY: sign}))
    assert f"{SIGN_KEY} = {sign!r}" in problem.what


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert refused(tmp_path).what == "holds no config.json"


def test_missing_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "nowhere").what


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "nope"}'])
def test_invalid_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "cannot be read" in refused(tmp_path).what


@pytest.mark.parametrize("kind", ["clip_text_model", "clip_vision_model", "siglip", "llava"])
def test_a_model_that_is_not_both_towers_of_clip(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert refused(tmp_path).what == f"is a {kind!r} model"


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    """Transformers then creates one that has only start and end tokens."""
    assert "has no tokenizer" in refused(describe(tmp_path, tokenizer=False)).what


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """Its ids would reach beyond the text tower's embeddings, which ends a CUDA process."""
    folder = describe(tmp_path, tokenizer=False)
    add_tokenizer(folder, words=65)
    assert "token 64" in refused(folder).what


# ---- test_description ----

TOWER = TextTower("some/clip", -1, "its config says so", 77, 768, 1024)


def test_summary_is_one_line_with_reasons() -> None:
    summary = format_summary(served(budget=16))
    assert "\n" not in summary
    assert served().state.digest[:12] in summary
    assert "keeps 16 tokens of an image, by --autoprune-budget" in summary
    assert "base policy cdpruner" in summary
    assert "because no --autoprune-text-tower is given" in summary
    assert "requests may set nothing, because no --autoprune-requests is given" in summary


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": 32}, "keeps 32 tokens of an image, as the state has it"),
        ({"tower": TOWER}, "relevance by CLIP text tower some/clip, sign -1, because its config"),
        ({"rules": RequestRules("none", explicit=True)}, "nothing, by --autoprune-requests none"),
        ({"rules": RequestRules("budget", 8, 64, True)}, "their budget, 8 to 64 tokens"),
        ({"rules": RequestRules("states", explicit=True)}, "any state, 1 to 65536 tokens"),
    ],
)
def test_each_reason(changes: dict[str, object], reason: str) -> None:
    changed = dataclasses.replace(served(), **changes)  # type: ignore[arg-type]
    assert reason in format_summary(changed)


def test_budgets_of_details_are_described_if_there_are_any() -> None:
    assert "image_url.detail" not in format_summary(served())
    assert describe_as_json(served())["detail"] is None
    rules = RequestRules(detail=DetailBudgets(low=64, high=256))
    both = dataclasses.replace(served(), rules=rules)
    expected = "image_url.detail low keeps 64 and high keeps 256 tokens of an image, by"
    assert f"{expected} --autoprune-detail" in format_summary(both)
    assert describe_as_json(both)["detail"] == {"low": 64, "high": 256}
    one = dataclasses.replace(served(), rules=RequestRules(detail=DetailBudgets(high=256)))
    assert "image_url.detail high keeps 256 tokens" in format_summary(one)
    assert describe_as_json(one)["detail"] == {"high": 256}


def test_recall_is_described_if_there_is_any() -> None:
    assert "recall" not in format_summary(served())
    assert describe_as_json(served())["recall"] == 0
    recalling = dataclasses.replace(served(), rules=RequestRules(recall=8))
    assert "later turns recall 8 tokens" in format_summary(recalling)
    assert describe_as_json(recalling)["recall"] == 8


def test_summary_has_relevance_only_if_it_is_read() -> None:
    blind = ServedState("LlavaForConditionalGeneration", load_state("visionzip"), 64, None, 0)
    assert "relevance" not in format_summary(blind)
    assert describe_as_json(blind)["relevance"] is None


def test_json_contains_no_path(tmp_path: Path) -> None:
    local = dataclasses.replace(TOWER, path=str(tmp_path))
    here = dataclasses.replace(served(), tower=local)
    assert str(tmp_path) in format_summary(here)
    description = json.dumps(describe_as_json(here))
    assert str(tmp_path) not in description and tmp_path.name not in description
    assert "CLIP text tower from a local folder, sign -1" in description
    hub = describe_as_json(dataclasses.replace(served(), tower=TOWER))["relevance"]
    assert hub == "CLIP text tower some/clip, sign -1, because its config says so"


def test_data_has_policy_digest_and_evidence() -> None:
    state = load_state("visionzip")
    description = describe_as_json(ServedState("LlavaForConditionalGeneration", state, 64, None, 0))
    assert (description["state"], description["digest"], description["base_policy"]) == (
        "visionzip",
        state.digest,
        "visionzip",
    )
    assert description["evidence"] == state.provenance.model_dump(mode="json")
    assert description["budget"] == {"k": 64, "follows_image_size": False, "q_e": 0, "r_min": 64}
