"""Settings of a server: read, checked, described."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def resolved(**settings: object) -> ServedState:
    return resolve_settings({"state": "autoprune", **settings}, vllm_config())


def test_each_setting_is_read_from_text_and_numbers(tiny_clip: TinyClip) -> None:
    for budget in (64, "64", " 64 "):
        assert resolved(budget=budget).policy().budget == 64
    sizes = ((0, 0), ("0", 0), (2, 1 << 31), ("0.5", 1 << 29), (1024, 1 << 40))
    for size, count in sizes:
        assert resolved(feature_cache_gb=size).cache_bytes == count
    tower = resolved(text_tower=str(tiny_clip.folder)).tower
    assert tower is not None
    assert (tower.path, tower.sign) == (str(tiny_clip.folder), -1)
    assert resolved().rules.cost == DEFAULT_COST
    assert resolved(request_cost="750").rules.cost == 750.0
    assert (resolved().rules.level, resolved().rules.recall) == ("budget", 0)
    for recall in (8, "8", " 8 "):
        assert resolved(recall=recall).rules.recall == 8
    for detail in ("low=16,high=64", {"low": 16, "high": "64"}):
        for requests in (None, "none", "budget:32-64", "states"):
            rules = resolved(requests=requests, detail=detail).rules
            assert rules.detail == DetailBudgets(16, 64)


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


FIXED = edited(sample(), {"/constraints/selector/q_e": 2, "/constraints/selector/r_min": 32})
LIMITED = edited(sample(), {"/budget": {"atom": "fixed_budget@32", "limit": 48}})


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        *((value, "additional_config/autoprune", "") for value in ("autoprune", 3, None, True)),
        ({"state": "autoprune", "buget": 3}, "additional_config/autoprune/buget", ""),
        *(
            (value, "--autoprune-state", "no state is given")
            for value in ({}, {"from_flags": True}, {"state": None}, {"budget": 64})
        ),
        ({"state": "autoprun"}, "--autoprune-state autoprun", "no such file"),
        *(
            ({"state": {"schema": value}}, "", "not JSON: ")
            for value in ({1, 2}, nested(100_000), 10**5000, b"bytes")
        ),
        *(
            ({"state": "autoprune", "budget": value}, "--autoprune-budget", str(value))
            for value in (0, -1, "0", "-1", 65537)
        ),
        *(
            ({"state": "autoprune", "budget": value}, "--autoprune-budget", "not a whole number")
            for value in ("x", "1.5", 1.5, "", True, [8])
        ),
        ({"state": LIMITED, "budget": 64}, "--autoprune-budget#/budget/limit", ""),
        ({"state": FIXED, "budget": 16}, "--autoprune-budget#/constraints/selector/r_min", "32"),
        *(
            ({"state": "autoprune", "feature_cache_gb": value}, "--autoprune-feature-cache-gb", "")
            for value in (-1, "-0.1", "nan", float("nan"), "inf", "much", 1025)
        ),
        ({"state": "autoprune", "requests": "everything"}, "--autoprune-requests", ""),
        *(
            ({"state": "autoprune", "request_cost": value}, "--autoprune-request-cost", "")
            for value in ("much", 0, -1, "nan", "inf", 1e9)
        ),
        *(
            (
                {"state": "autoprune", "requests": "budget:1-64", "recall": value},
                "--autoprune-recall",
                "",
            )
            for value in ("much", -1, 1.5, 65)
        ),
        (
            {"state": "autoprune", "requests": "budget:1-64", "detail": "low=65"},
            "--autoprune-detail",
            "low = 65, and --autoprune-requests allows 64 at most",
        ),
        ({"state": FIXED, "detail": "low=16,high=64"}, "--autoprune-detail low#", ""),
        ({"state": "autoprune", "detail": "high=99999"}, "--autoprune-detail", "high = 99999"),
    ],
)
def test_each_mistake_has_its_place_and_a_fix(settings: object, where: str, what: str) -> None:
    (problem,) = refusal(settings)
    assert problem.where.startswith(where)
    assert what in problem.what


def test_what_a_state_allows_is_accepted() -> None:
    assert resolved(state=LIMITED, budget=48).budget == 48
    resolved(state=FIXED, detail="low=32")


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"/schema": "autoprune-state/9"}, "/schema", "autoprune-state/9"),
        ({"/scoring/fusion/atom": "no-atom"}, "/scoring/fusion/atom", "no-atom"),
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
    file.write_text("state: 3")
    (problem,) = refusal({"state": str(file)})
    assert (problem.where, "not JSON" in problem.what) == (f"--autoprune-state {file}", True)


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


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForConditionalGeneration", "InternVLForConditionalGeneration"]
)
def test_recall_is_refused_where_an_image_cannot_be_several_items(architecture: str) -> None:
    config = vllm_config(architecture=architecture)
    (problem,) = refusal({"state": "divprune", "recall": 8}, config)
    assert problem.where == "--autoprune-recall"
    assert "this model" in problem.what
    resolve_settings({"state": "divprune", "recall": 0}, config)


# ---- text towers ----


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


@pytest.mark.parametrize(
    ("config", "what"),
    [
        *(({SIGN_KEY: sign}, f"{SIGN_KEY} = {sign!r}") for sign in (0, 2, "1", [1], True, 0.5)),
        *((text, "cannot be read") for text in ("{", "[]", "{}", '{"model_type": "nope"}')),
        *(
            (f'{{"model_type": "{kind}"}}', f"is a {kind!r} model")
            for kind in ("clip_text_model", "clip_vision_model", "siglip", "llava")
        ),
    ],
)
def test_a_config_that_is_none_of_clip_s_is_refused(tmp_path: Path, config: Any, what: str) -> None:
    if isinstance(config, str):
        (tmp_path / "config.json").write_text(config)
    else:
        describe(tmp_path, config)
    assert what in refused(tmp_path).what


def test_folders_that_hold_no_text_tower(tmp_path: Path) -> None:
    """Without a tokenizer transformers creates one that has only start and end tokens.

    Ids of another model's would reach beyond the embeddings, which ends a CUDA process.
    """
    assert refused(tmp_path).what == "holds no config.json"
    assert "cannot be read" in refused(tmp_path / "nowhere").what
    folder = describe(tmp_path / "bare", tokenizer=False)
    assert "has no tokenizer" in refused(folder).what
    add_tokenizer(folder, words=65)
    assert "token 64" in refused(folder).what


# ---- descriptions ----

TOWER = TextTower("some/clip", -1, "its config says so", 77, 768, 1024)


@pytest.mark.parametrize(
    ("changes", "reason", "field", "value"),
    [
        ({"budget": 32}, "keeps 32 tokens of an image, as the state has it", "recall", 0),
        (
            {"tower": TOWER},
            "relevance by CLIP text tower some/clip, sign -1, because its config",
            "relevance",
            "CLIP text tower some/clip, sign -1, because its config says so",
        ),
        (
            {"rules": RequestRules("budget", 8, 64, True, recall=8)},
            "later turns recall 8 tokens",
            "recall",
            8,
        ),
        (
            {"rules": RequestRules("states", explicit=True)},
            "any state, 1 to 65536 tokens",
            "core",
            None,
        ),
        (
            {"rules": RequestRules(detail=DetailBudgets(low=64, high=256))},
            "image_url.detail low keeps 64 and high keeps 256 tokens of an image, by",
            "detail",
            {"low": 64, "high": 256},
        ),
    ],
)
def test_each_choice_is_described_with_its_reason(
    changes: dict[str, Any], reason: str, field: str, value: object
) -> None:
    changed = dataclasses.replace(served(), **changes)
    assert reason in format_summary(changed)
    assert describe_as_json(changed)[field] == value


def test_json_contains_no_path(tmp_path: Path) -> None:
    local = dataclasses.replace(TOWER, path=str(tmp_path))
    here = dataclasses.replace(served(), tower=local)
    assert str(tmp_path) in format_summary(here)
    description = json.dumps(describe_as_json(here))
    assert str(tmp_path) not in description and tmp_path.name not in description
    assert "CLIP text tower from a local folder, sign -1" in description
