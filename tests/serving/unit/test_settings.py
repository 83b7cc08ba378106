"""Settings of a server: read from flags or Python, checked, described; flags of vLLM's parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.api.endpoint import describe_as_json, format_summary
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.settings import (
    LEVELS,
    MIDDLEWARE,
    SETTINGS_KEY,
    SIGN_KEY,
    DetailBudgets,
    RequestRules,
    TextTower,
    read_text_tower,
)
from vllm_autoprune.serving.startup import resolve_settings
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import shipped_states

Config = dict[str, Any]


def resolve(**settings: object) -> ServedState:
    return resolve_settings({"state": "autoprune", **settings}, vllm_config())


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
    state = resolve(state=forms[form])
    assert state.state.digest == load_state("autoprune").digest
    assert (state.architecture, state.budget, state.tower) == (LLAVA, 32, None)
    assert state.cache_bytes == 1 << 28


def test_each_setting_is_read_from_text_and_numbers(tiny_clip: TinyClip) -> None:
    for budget in (64, "64", " 64 "):
        assert resolve(budget=budget).policy().budget == 64
    for size, count in ((0, 0), ("0", 0), (2, 1 << 31), ("0.5", 1 << 29), (1024, 1 << 40)):
        assert resolve(feature_cache_gb=size).cache_bytes == count
    assert (resolve().rules.cost, resolve(request_cost="750").rules.cost) == (DEFAULT_COST, 750.0)
    for recall in (8, "8", " 8 "):
        assert resolve(recall=recall).rules.recall == 8
    for detail in ("low=16,high=64", {"low": 16, "high": "64"}):
        for requests in (None, "none", "budget:32-64", "states"):
            rules = resolve(requests=requests, detail=detail).rules
            assert rules.detail == DetailBudgets(16, 64)
    tower = resolve(text_tower=str(tiny_clip.folder)).tower
    assert tower is not None
    assert (tower.path, tower.sign) == (str(tiny_clip.folder), -1)
    assert (tower.segment, tower.width, tower.vision_width) == (SEGMENT, WIDTH, VISION_WIDTH)


def test_levels_are_cumulative_and_a_range_holds_at_both_ends() -> None:
    assert resolve().rules == RequestRules("budget", 1, 65536, explicit=False)
    for level in LEVELS:
        rules = resolve(requests=level).rules
        assert (rules.level, rules.explicit) == (level, True)
        allowed = [other for other in LEVELS if rules.allows(other)]
        assert allowed == list(LEVELS[: LEVELS.index(rules.level) + 1])
    rules = resolve(requests=" budget:16-256 ").rules
    assert [rules.contains(k) for k in (15, 16, 256, 257)] == [False, True, True, False]
    assert str(rules) == "budget:16-256"
    assert resolve(requests=str(rules)).rules == rules


def nest(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


FIXED = edited(sample(), {"/constraints/selector/q_e": 2, "/constraints/selector/r_min": 32})
LIMITED = edited(sample(), {"/budget": {"atom": "fixed_budget@32", "limit": 48}})
STATE: Config = {"state": "autoprune"}
TO_64: Config = {**STATE, "requests": "budget:1-64"}
RULES = ("all", "", "Budget", "budget:", "budget:16", "budget:16-", "budget:-3-8", "budget:1-2-3")
ODD_RULES = ("budget,states", True, 3, ["budget"], {"level": "budget"})
RANGES = ("budget:a-b", "budget:1-9999999", "budget:0-8", "budget:9-8", "states:1-65537")


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        *((value, "additional_config/autoprune", "") for value in ("autoprune", 3, None, True)),
        ({**STATE, "buget": 3}, "additional_config/autoprune/buget", ""),
        *(
            (value, "--autoprune-state", "no state is given")
            for value in ({}, {"from_flags": True}, {"state": None}, {"budget": 64})
        ),
        ({"state": "autoprun"}, "--autoprune-state autoprun", "no such file"),
        ({"state": edited(sample(), {"/schema": "x/9"})}, "#/schema", "x/9"),
        *(
            ({"state": {"schema": value}}, "", "not JSON: ")
            for value in ({1, 2}, nest(100_000), 10**5000, b"bytes")
        ),
        *(
            ({**STATE, "budget": value}, "--autoprune-budget", str(value))
            for value in (0, -1, "0", "-1", 65537)
        ),
        *(
            ({**STATE, "budget": value}, "--autoprune-budget", "not a whole number")
            for value in ("x", "1.5", 1.5, "", True, [8])
        ),
        ({"state": LIMITED, "budget": 64}, "--autoprune-budget#/budget/limit", ""),
        ({"state": FIXED, "budget": 16}, "--autoprune-budget#/constraints/selector/r_min", "32"),
        *(
            ({**STATE, "feature_cache_gb": value}, "--autoprune-feature-cache-gb", "")
            for value in (-1, "-0.1", "nan", float("nan"), "inf", "much", 1025)
        ),
        *(
            ({**STATE, "request_cost": value}, "--autoprune-request-cost", "")
            for value in ("much", 0, -1, "nan", "inf", 1e9)
        ),
        *(
            ({**STATE, "requests": value}, "--autoprune-requests", "")
            for value in (*RULES, *ODD_RULES, *RANGES)
        ),
        *(({**TO_64, "recall": value}, "--autoprune-recall", "") for value in ("x", -1, 1.5, 65)),
        *(
            ({**STATE, "detail": value}, "--autoprune-detail", what)
            for value, what in (
                ("auto=64", "'auto' is no level"),
                ("", "'' is no level"),
                (64, "'64' is no level"),
                (["low=64"], "is no level"),
                ({1: 64}, "'1' is no level"),
                ({}, "gives no budget"),
                ("low", "low = '' is not a number of tokens"),
                ("low=0", "low = '0' is not"),
                ("low=6.5", "low = '6.5' is not"),
                ({"low": True}, "low = 'True' is not"),
                ("low=4,low=8", "low is given twice"),
                ("low=8,high=4", "low = 8 keeps more tokens than high = 4"),
                ("high=99999", "high = 99999"),
            )
        ),
        (
            {**TO_64, "detail": "low=65"},
            "--autoprune-detail",
            "low = 65, and --autoprune-requests allows 64 at most",
        ),
        ({"state": FIXED, "detail": "low=16,high=64"}, "--autoprune-detail low#", ""),
    ],
)
def test_each_mistake_has_its_place_and_a_fix(settings: object, where: str, what: str) -> None:
    (problem,) = refusal(settings)
    assert problem.where.startswith(where)
    assert what in problem.what


def test_what_a_state_allows_is_accepted() -> None:
    assert resolve(state=LIMITED, budget=48).budget == 48
    resolve(state=FIXED, detail="low=32")


def test_all_problems_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    file = tmp_path / "state.json"
    file.write_text(json.dumps(edited(sample(), {"/constraints/selector/q_e": -1, "/fusion": 1})))
    settings = {
        "state": str(file),
        "budget": "x",
        "text_tower": str(tmp_path),
        "feature_cache_gb": "x",
        "detail": "low=x,medium=3,high=0",
        "buget": 1,
    }
    assert sorted(places(settings, vllm_config(architecture="Other"))) == [
        "--autoprune-budget",
        *["--autoprune-detail"] * 3,
        "--autoprune-feature-cache-gb",
        f"--autoprune-state {file}#/constraints/selector/q_e",
        f"--autoprune-state {file}#/fusion",
        f"--autoprune-text-tower {tmp_path}",
        "VLLM_USE_RUST_FRONTEND",
        "additional_config/autoprune/buget",
        "model",
    ]


# ---- text towers ----


@pytest.mark.parametrize(
    ("stated", "sign", "because"),
    [
        ({}, -1, "states no direction"),
        ({SIGN_KEY: None}, -1, "states no direction"),
        *(({SIGN_KEY: sign}, int(sign), SIGN_KEY) for sign in (1, -1, 1.0)),
    ],
)
def test_the_sign_comes_with_its_reason(
    tmp_path: Path, stated: dict[str, object], sign: int, because: str
) -> None:
    tower = read_text_tower(str(describe(tmp_path, stated)))
    assert (tower.sign, type(tower.sign)) == (sign, int)
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
        (None, "holds no config.json"),
        # Transformers makes a tokenizer that has only start and end tokens.
        ("no tokenizer", "has no tokenizer"),
        # Ids of another model's reach beyond the embeddings, which ends a CUDA process.
        ("another tokenizer", "token 64"),
        ("nowhere", "cannot be read"),
    ],
)
def test_what_is_no_text_tower_is_refused(tmp_path: Path, config: Any, what: str) -> None:
    folder = tmp_path / "nowhere" if config == "nowhere" else tmp_path
    if isinstance(config, dict):
        describe(folder, config)
    elif isinstance(config, str) and "tokenizer" in config:
        describe(folder, tokenizer=False)
        if config == "another tokenizer":
            add_tokenizer(folder, words=65)
    elif config not in (None, "nowhere"):
        (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError) as caught:
        read_text_tower(str(folder))
    (problem,) = caught.value.problems
    assert problem.where == f"--autoprune-text-tower {folder}"
    assert what in problem.what and problem.fix


def test_a_text_tower_of_another_vision_tower_is_refused(tmp_path: Path) -> None:
    vision = SimpleNamespace(model_type="clip_vision_model", hidden_size=1024)
    settings = {**STATE, "text_tower": str(describe(tmp_path))}
    (problem,) = refusal(settings, vllm_config(vision_config=vision))
    assert problem.where == f"--autoprune-text-tower {tmp_path}"
    assert "24 wide, the model's 1024" in problem.what


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
    changed = replace(served(), **changes)
    assert reason in format_summary(changed)
    assert describe_as_json(changed)[field] == value


def test_json_contains_no_path(tmp_path: Path) -> None:
    here = replace(served(), tower=replace(TOWER, path=str(tmp_path)))
    assert str(tmp_path) in format_summary(here)
    description = json.dumps(describe_as_json(here))
    assert str(tmp_path) not in description and tmp_path.name not in description
    assert "CLIP text tower from a local folder, sign -1" in description


# ---- flags ----


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        # What register() puts in place goes away with the patch.
        steps = ((EngineArgs, "add_cli_args"), (VllmConfig, "try_verify_and_update_config"))
        for owner, name in steps:
            patch.setattr(owner, name, vars(owner)[name])
        patch.delenv(plugin.DISABLE, raising=False)
        plugin.register()
        plugin.register()
        yield EngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def parse(parser: Any) -> Callable[..., Config]:
    return lambda *words: dict(parser.parse_args(list(words)).additional_config)


def test_a_server_with_a_state_keeps_headers_once(parser: Any) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = make_arg_parser(FlexibleArgumentParser())
    flags = ["--autoprune-state", "trim", "--middleware", "a.B", "--autoprune-budget", "8"]
    assert sorted(server.parse_args(flags).middleware) == ["a.B", MIDDLEWARE]
    config = ["--additional-config", '{"autoprune": {"state": "trim"}}']
    assert server.parse_args(config).middleware == [MIDDLEWARE]
    assert server.parse_args([]).middleware == []
    assert not hasattr(parser.parse_args(flags[:2]), "middleware")


def from_flags(**settings: object) -> Config:
    return {SETTINGS_KEY: {**settings, "from_flags": True}}


THEIRS = ("--additional-config", '{"theirs": {"x": 1}}')
NAMED = ("--autoprune-state", "autoprune")
FLAGS = (*NAMED, "--autoprune-budget", "64")
OURS = ("--additional-config", '{"autoprune": {"budget": 16, "text_tower": "some/clip"}}')
DOTTED = ("--additional-config.autoprune.budget", "16")
BOTH = {"theirs": {"x": 1}, **from_flags(state="autoprune", budget="64")}


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ((), {}),
        (
            ("--autoprune-text-tower", "a/b", "--autoprune-detail", "low=1"),
            from_flags(text_tower="a/b", detail="low=1"),
        ),
        ((*THEIRS, *FLAGS), BOTH),
        ((*FLAGS, *THEIRS), BOTH),
        # Of settings in JSON and in flags the later one wins.
        ((*OURS, *FLAGS), from_flags(state="autoprune", budget="64", text_tower="some/clip")),
        ((*FLAGS, *OURS), from_flags(state="autoprune", budget=16, text_tower="some/clip")),
        ((*DOTTED, *NAMED), from_flags(state="autoprune", budget=16)),
        ((*NAMED, "=".join(DOTTED)), from_flags(state="autoprune", budget=16)),
        (DOTTED, {SETTINGS_KEY: {"budget": 16}}),
        (
            ("--additional-config.autoprune.detail.low", "16"),
            {SETTINGS_KEY: {"detail": {"low": 16}}},
        ),
    ],
)
def test_flags_and_additional_config_are_merged_in_either_order(
    parse: Callable[..., Config], words: tuple[str, ...], config: Config
) -> None:
    assert parse(*words) == config


@pytest.mark.parametrize("value", ["[1]", "3", "text"])
def test_additional_config_must_be_an_object(
    parse: Callable[..., Config], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--additional-config", value)
    assert "not a JSON object" in capsys.readouterr().err
