"""Plugin entry point, tested in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from vllm_autoprune.serving import plugin

PROGRAM = """
import json, os
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.startup.activation import activate

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
