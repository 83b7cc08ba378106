"""Settings of a server: read from flags or Python, checked, described; flags of vLLM's parser."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.engine import CLIP
from tests.serving.unit.configurations import refusal, vllm_config
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune import ConfigError, load_state, materialize
from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.description import describe as describe_server
from vllm_autoprune.serving.flags import MIDDLEWARE
from vllm_autoprune.serving.history import History
from vllm_autoprune.serving.request_rules import LEVELS, DetailBudgets, RequestRules
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.settings import SETTINGS_KEY, Settings
from vllm_autoprune.serving.startup import _resolve_settings
from vllm_autoprune.text_tower import SIGN_KEY, read_text_tower
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import shipped_states

Config = dict[str, Any]


def resolve(**settings: object) -> ServedState:
    return _resolve_settings({"state": "autoprune", **settings}, vllm_config())


def test_a_state_is_read_from_every_form() -> None:
    file = shipped_states()["autoprune"]
    loaded = load_state("autoprune")
    forms = ("autoprune", file, str(file), file.read_text(), shipped("autoprune"))
    for form in (*forms, loaded):
        assert resolve(state=form).state.digest == loaded.digest


def test_defaults_of_a_server() -> None:
    server = resolve()
    assert (server.budget.rule(), server.text_tower) == (32, None)
    assert server.cache_bytes == 1 << 28
    assert (server.rules.cost, server.rules.total) == (DEFAULT_COST, None)


@pytest.mark.parametrize(
    "budget", [64, "64", " 64 ", "1/8:1-64", "12.5%:8-64"], ids=repr
)
def test_a_budget_is_read_and_reaches_every_process(budget: object) -> None:
    server = pickle.loads(pickle.dumps(resolve(budget=budget)))
    policy = materialize(server.state, server.budget)
    assert (policy.budget, policy.at(512).budget) == (64, 64)


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 0), ("0", 0), (2, 1 << 31), ("0.5", 1 << 29), (1024, 1 << 40)],
    ids=repr,
)
def test_the_feature_cache_is_as_large_as_it_is_set(size: object, count: int) -> None:
    assert resolve(feature_cache_gb=size).cache_bytes == count


def test_bounds_of_requests_are_read_from_text_and_numbers() -> None:
    assert resolve(request_cost="750").rules.cost == 750.0
    assert resolve(request_budget="2048").rules.total == 2048
    for recall in (8, "8"):
        assert resolve(recall=recall, requests="budget:1-8").rules.recall == 8


@pytest.mark.parametrize("rule", ["2:1/8", "1:12.5%:8-64,every=4", "3:128"])
def test_a_rule_for_older_images_reaches_every_process(rule: str) -> None:
    server = pickle.loads(pickle.dumps(resolve(history=f" {rule} ")))
    described = str(describe_server(server)["history"])
    assert History.parse(described, "") == server.rules.history
    assert described.partition(":")[0] == rule[0]
    with_core = edited(sample(), {"/core": {"share": 0.5}})
    assert str(resolve(state=with_core, history=2).rules.history) == "2"


@pytest.mark.parametrize("requests", [None, "none", "budget:32-64"], ids=repr)
@pytest.mark.parametrize(
    "detail", ["low=16,high=64", {"low": 16, "high": "64"}], ids=repr
)
def test_budgets_by_detail_are_read(detail: object, requests: str | None) -> None:
    rules = resolve(requests=requests, detail=detail).rules
    assert rules.detail == DetailBudgets.model_validate({"low": 16, "high": 64})


def test_shares_by_detail_are_described_as_flags_take_them() -> None:
    server = resolve(detail="low=1/16:1-64,high=25%:1-640", requests="budget:1-640")
    description = describe_server(server)
    assert description["detail"] == {"low": "1/16:1-64", "high": "1/4:1-640"}


def test_a_text_tower_is_described_by_its_checkpoint() -> None:
    tower = resolve(text_tower=str(CLIP)).text_tower
    assert tower is not None
    assert (tower.path, tower.sign, tower.vocabulary) == (str(CLIP), 1, 478)
    assert (tower.segment, tower.width, tower.vision_width) == (40, 128, 160)


def test_levels_are_cumulative_and_have_a_range() -> None:
    assert resolve().rules == RequestRules("budget", 1, 65536, explicit=False)
    for rank, level in enumerate(LEVELS):
        rules = resolve(requests=level).rules
        assert (rules.level, rules.explicit) == (level, True)
        allowed = [other for other in LEVELS if rules.allows(other)]
        assert allowed == list(LEVELS[: rank + 1])
    rules = resolve(requests=" budget:16-256 ").rules
    assert (str(rules), rules.minimum, rules.maximum) == ("budget:16-256", 16, 256)


def nest(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


FIXED = edited(
    sample(), {"/constraints/selector/q_e": 2, "/constraints/selector/r_min": 32}
)
LIMITED = edited(sample(), {"/budget": {"atom": "fixed_budget@32", "limit": 48}})
STATE: Config = {"state": "autoprune"}
TO_64: Config = {**STATE, "requests": "budget:1-64"}
INVALID: dict[str, tuple[object, ...]] = {
    "feature_cache_gb": (-1, "nan", float("nan"), "inf", "much", 1025, True),
    "request_cost": ("much", 0, "nan", "inf", 1e9, True),
    "request_budget": ("much", 0, -1, 1.5, 10**10, True),
    "requests": (
        "all",
        "Budget",
        "budget:16",
        "budget:-3-8",
        "budget:9-8",
        "budget,none",
        3,
    ),
    "recall": ("x", -1, 1.5, 65537, True),
    "history": ("x", 0, 1.5, True, "1:", "1:0", "1:9/8", "1,every=0", "1;every=2"),
    "detail": (
        "auto=64",
        64,
        ["low=64"],
        {1: 64},
        {},
        {"low": True},
        "low=0",
        "low=9/8",
    ),
}
ABOVE = "low = 65 keeps up to 65 tokens, and --autoprune-requests allows 64 at most"


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ("autoprune", "additional_config/autoprune", ""),
        ({**STATE, "buget": 3}, "additional_config/autoprune/buget", ""),
        *(
            (value, "--autoprune-state", "no state is given")
            for value in ({"from_flags": True}, {"state": None}, {"budget": 64})
        ),
        ({"state": "autoprun"}, "--autoprune-state autoprun", "no such file"),
        ({"state": edited(sample(), {"/schema": "x/9"})}, "#/schema", "x/9"),
        *(
            ({"state": {"schema": value}}, "", "not JSON: ")
            for value in ({1, 2}, nest(100_000), 10**5000, b"bytes")
        ),
        *(
            ({**STATE, "budget": value}, "--autoprune-budget", "is not a budget")
            for value in (0, "-1", 65537, "x", 1.5, [8], True, "9/8", "1/8:640-64")
        ),
        ({"state": LIMITED, "budget": 64}, "--autoprune-budget#/budget/limit", ""),
        (
            {"state": LIMITED, "budget": "1/8"},
            "--autoprune-budget#/budget/limit",
            "K = 65536",
        ),
        (
            {"state": FIXED, "budget": 16},
            "--autoprune-budget#/constraints/selector/r_min",
            "32",
        ),
        *(
            ({**STATE, name: value}, f"--autoprune-{name.replace('_', '-')}", "")
            for name, values in INVALID.items()
            for value in values
        ),
        ({**STATE, "history": 2}, "--autoprune-history", "'autoprune' has no core"),
        (
            {"state": LIMITED, "history": "1:64"},
            "--autoprune-history#/budget/limit",
            "",
        ),
        ({**TO_64, "recall": 65}, "--autoprune-recall", "allows 64 at most"),
        ({**STATE, "detail": "low=8,low=4"}, "--autoprune-detail", "one budget"),
        (
            {**STATE, "detail": "low=8,high=4"},
            "--autoprune-detail",
            "can keep more than",
        ),
        (  # of images of 128 to 512 tokens alone
            {**STATE, "detail": "low=1/4:1-64,high=1/8:16-640"},
            "--autoprune-detail",
            "can keep more than",
        ),
        (
            {**STATE, "detail": "low=1/4,high=64"},
            "--autoprune-detail",
            "1/4 can keep more than",
        ),
        ({**STATE, "detail": "high=99999"}, "--autoprune-detail", "high=99999"),
        (
            {**TO_64, "detail": "low=1/8"},
            "--autoprune-detail",
            "up to 65536 tokens, and",
        ),
        ({**TO_64, "detail": "low=65"}, "--autoprune-detail", ABOVE),
        ({"state": FIXED, "detail": "low=16,high=64"}, "--autoprune-detail low#", ""),
    ],
)
def test_each_mistake_has_its_place_and_a_fix(
    settings: object, where: str, what: str
) -> None:
    (problem,) = refusal(settings)
    assert problem.where.startswith(where)
    assert what in problem.what


@pytest.mark.parametrize("setting", Settings.model_fields)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_flag_is_refused_as_that(setting: str, value: str) -> None:
    """As ``--autoprune-state "$STATE"`` gives it, where the variable is not set."""
    (problem,) = refusal({**STATE, setting: value})
    assert problem.where == f"--autoprune-{setting.replace('_', '-')}"
    assert problem.what.startswith("is empty")


@parametrize_from_file("setting", "template")
def test_numbers_are_of_ascii_digits(setting: str, template: str) -> None:
    """Others are digits to Python, which have another look for whoever reads the flag."""
    for digit in ("٣", "३", "３", "²"):
        (problem,) = refusal({**STATE, setting: template.format(digit)})
        assert problem.where.startswith(f"--autoprune-{setting.replace('_', '-')}")


# ---- text towers ----

STATED: Config = {}
CONFIG = json.loads((CLIP / "config.json").read_text())


def describe(folder: Path, changes: Config = STATED, tokenizer: bool = True) -> Path:
    """Describe the CLIP of mini-LLaVA, without weights; None takes a key out of its config."""
    config = {
        key: value for key, value in {**CONFIG, **changes}.items() if value is not None
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(CLIP / name, folder)
    return folder


@parametrize_from_file("stated", "sign", "because")
def test_the_sign_comes_with_its_reason(
    tmp_path: Path, stated: dict[str, object], sign: int, because: str
) -> None:
    tower = read_text_tower(str(describe(tmp_path, stated)))
    assert (tower.sign, type(tower.sign)) == (sign, int)
    assert because in tower.reason


@pytest.mark.parametrize(
    ("config", "what"),
    [
        *(({SIGN_KEY: sign}, f"{SIGN_KEY} = {sign!r}") for sign in (0, "1", True)),
        *((text, "cannot be read") for text in ("{", "[]", '{"model_type": "nope"}')),
        *(
            (f'{{"model_type": "{kind}"}}', f"a {kind!r} model")
            for kind in ("siglip", "llava")
        ),
        (None, "cannot be read"),
        # Transformers makes a tokenizer that has only start and end tokens.
        ("no tokenizer", "has no tokenizer"),
        # Ids of another model's reach beyond the embeddings, which ends a CUDA process.
        ({"text_config": {**CONFIG["text_config"], "vocab_size": 477}}, "token 477"),
        ("nowhere", "cannot be read"),
    ],
)
def test_what_is_no_text_tower_is_refused(
    tmp_path: Path, config: Any, what: str
) -> None:
    folder = tmp_path / "nowhere" if config == "nowhere" else tmp_path
    if isinstance(config, dict):
        describe(folder, config)
    elif config == "no tokenizer":
        describe(folder, tokenizer=False)
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
    assert "160 wide, the model's 1024" in problem.what


# ---- flags ----


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        # What register() puts in place goes away with the patch.
        steps = (
            (EngineArgs, "add_cli_args"),
            (VllmConfig, "try_verify_and_update_config"),
        )
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
    flags = [
        "--autoprune-state",
        "trim",
        "--middleware",
        "a.B",
        "--autoprune-budget",
        "8",
    ]
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
OURS = (
    "--additional-config",
    '{"autoprune": {"budget": 16, "text_tower": "some/clip"}}',
)
DOTTED = ("--additional-config.autoprune.budget", "16")
BOTH = {"theirs": {"x": 1}, **from_flags(state="autoprune", budget="64")}


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ((), {}),
        ((*THEIRS, *FLAGS), BOTH),
        ((*FLAGS, *THEIRS), BOTH),
        # Of settings in JSON and in flags the later one wins.
        (
            (*OURS, *FLAGS),
            from_flags(state="autoprune", budget="64", text_tower="some/clip"),
        ),
        (
            (*FLAGS, *OURS),
            from_flags(state="autoprune", budget=16, text_tower="some/clip"),
        ),
        ((*DOTTED, *NAMED), from_flags(state="autoprune", budget=16)),
        (DOTTED, {SETTINGS_KEY: {"budget": 16}}),
    ],
)
def test_flags_and_additional_config_are_merged_in_either_order(
    parse: Callable[..., Config], words: tuple[str, ...], config: Config
) -> None:
    assert parse(*words) == config


def test_additional_config_must_be_an_object(
    parse: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--additional-config", "[1]")
    assert "not a JSON object" in capsys.readouterr().err
