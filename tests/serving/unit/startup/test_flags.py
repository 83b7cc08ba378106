"""The flags, on the parser that `vllm serve` builds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.startup.flags import MIDDLEWARE, SETTINGS_KEY

pytestmark = pytest.mark.compat

Config = dict[str, Any]


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        # What register() puts in place goes away with the patch.
        for owner, name in ((EngineArgs, "add_cli_args"), (VllmConfig, VERIFY)):
            patch.setattr(owner, name, vars(owner)[name])
        patch.delenv(plugin.DISABLE, raising=False)
        plugin.register()
        plugin.register()
        yield EngineArgs.add_cli_args(FlexibleArgumentParser())


VERIFY = "try_verify_and_update_config"


@pytest.fixture
def parsed(parser: Any) -> Callable[..., Config]:
    def parse(*words: str) -> Config:
        config: Config = parser.parse_args(list(words)).additional_config
        return config

    return parse


def asjson(**entries: object) -> str:
    return json.dumps(entries)


def ours(**settings: object) -> Config:
    return {SETTINGS_KEY: {**settings, "from_flags": True}}


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


def test_flags_are_stored_unparsed_in_additional_config(
    parsed: Callable[..., Config],
) -> None:
    config = parsed(
        *("--autoprune-state", "autoprune", "--autoprune-budget", "64"),
        *("--autoprune-text-tower", "some/clip", "--autoprune-feature-cache-gb", "0.5"),
        *("--autoprune-requests", "budget:16-64", "--autoprune-detail", "low=16,high=64"),
    )
    assert config == ours(
        state="autoprune",
        budget="64",
        text_tower="some/clip",
        feature_cache_gb="0.5",
        requests="budget:16-64",
        detail="low=16,high=64",
    )


def test_without_flags_the_namespace_is_unchanged(parser: Any) -> None:
    namespace = parser.parse_args([])
    assert namespace.additional_config == {}
    assert not [name for name in vars(namespace) if "autoprune" in name]


def test_engine_arguments_contain_the_flags(parser: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    words = ["--model", str(tmp_path), "--autoprune-state", "autoprune"]
    engine_args = EngineArgs.from_cli_args(parser.parse_args(words))
    assert engine_args.additional_config == ours(state="autoprune")


THEIRS = ("--additional-config", asjson(theirs={"x": 1}))
FLAGS = ("--autoprune-state", "autoprune", "--autoprune-budget", "64")


@pytest.mark.parametrize("words", [(*THEIRS, *FLAGS), (*FLAGS, *THEIRS)], ids=["before", "after"])
def test_additional_config_of_others_is_kept_in_either_order(
    parsed: Callable[..., Config], words: tuple[str, ...]
) -> None:
    assert parsed(*words) == {"theirs": {"x": 1}, **ours(state="autoprune", budget="64")}


OWN = ("--additional-config", asjson(autoprune={"budget": 16, "text_tower": "some/clip"}))


@pytest.mark.parametrize(
    ("words", "budget"),
    [((*OWN, *FLAGS), "64"), ((*FLAGS, *OWN), 16)],
    ids=["before", "after"],
)
def test_settings_in_json_and_in_flags_are_merged_and_the_later_wins(
    parsed: Callable[..., Config], words: tuple[str, ...], budget: object
) -> None:
    assert parsed(*words) == ours(state="autoprune", budget=budget, text_tower="some/clip")


@pytest.mark.parametrize(
    "words",
    [("--additional-config.autoprune.budget", "16"), ("--additional-config.autoprune.budget=16",)],
)
def test_dotted_keys_are_merged_too(parsed: Callable[..., Config], words: tuple[str, ...]) -> None:
    state = ("--autoprune-state", "autoprune")
    expected = ours(state="autoprune", budget=16)
    assert parsed(*words, *state) == parsed(*state, *words) == expected
    assert parsed(*words) == {SETTINGS_KEY: {"budget": 16}}


def test_dotted_keys_of_one_setting(parsed: Callable[..., Config]) -> None:
    words = ("--additional-config.autoprune.detail.low", "16")
    assert parsed(*words) == {SETTINGS_KEY: {"detail": {"low": 16}}}


def test_parses_are_independent(parsed: Callable[..., Config]) -> None:
    parsed(*FLAGS)
    parsed(*OWN, *FLAGS)
    assert parsed() == {}
    assert parsed("--autoprune-state", "other") == ours(state="other")
    assert parsed(*THEIRS) == {"theirs": {"x": 1}}


def test_parser_default_is_merged_and_not_modified(
    parser: Any, parsed: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    default = {"theirs": {"x": 1}}
    (action,) = [a for a in parser._actions if a.dest == "additional_config"]
    monkeypatch.setattr(action, "default", default)
    for budget in ("16", "64"):
        words = ("--autoprune-budget", budget, "--autoprune-state", "autoprune")
        assert parsed(*words) == {**default, **ours(state="autoprune", budget=budget)}
        assert default == {"theirs": {"x": 1}}
    assert parsed() is default


@pytest.mark.parametrize("value", ["[1]", "3", "text"])
def test_additional_config_must_be_an_object(
    parsed: Callable[..., Config], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--additional-config", value)
    assert "not a JSON object" in capsys.readouterr().err


def test_the_flags_are_a_group_of_their_own_added_once(parser: Any) -> None:
    (group,) = [g for g in parser._action_groups if g.title == "AutoPrune"]
    assert [action.option_strings for action in group._group_actions] == [
        ["--autoprune-state"],
        ["--autoprune-budget"],
        ["--autoprune-text-tower"],
        ["--autoprune-feature-cache-gb"],
        ["--autoprune-requests"],
        ["--autoprune-detail"],
        ["--autoprune-recall"],
        ["--autoprune-request-cost"],
    ]
    assert all(action.help for action in group._group_actions)
    assert isinstance(group, argparse._ArgumentGroup)


def test_asynchronous_engines_have_the_flags_as_well() -> None:
    """`vllm serve` builds its parser by AsyncEngineArgs, which adds EngineArgs' own."""
    import inspect

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert "EngineArgs.add_cli_args(" in inspect.getsource(AsyncEngineArgs.add_cli_args)
