"""What is replaced in vLLM while models are served: what the code declares, and no more."""

from __future__ import annotations

import importlib
from operator import attrgetter

import pytest

from tests.serving.engine import LLAVA, built, start
from tests.serving.runners import in_engine
from vllm_autoprune.serving import compat
from vllm_autoprune.serving.compat import collect_hooks, find_runner

pytestmark = [pytest.mark.engine, pytest.mark.compat]


@pytest.mark.both
@in_engine
def test_what_is_wrapped_in_vllm_is_declared_for_the_runner() -> None:
    """In one process that is API server, engine core and worker, of models of both kinds."""
    for model in (LLAVA, built("qwen2_5_vl")):
        settings = {"state": "divprune", "budget": 4, "requests": "budget"}
        engine = start(settings, model)
        runner = find_runner(engine.llm.llm_engine.vllm_config)
        engine.stop()
    hooks, _ = collect_hooks()
    declared = set()
    for hook in hooks:
        if hook.patch is not None and hook.runner in (None, runner):
            module = importlib.import_module(hook.module)
            for owner, _, name in (name.rpartition(".") for name in hook.names):
                declared.add((attrgetter(owner)(module) if owner else module, name))
    assert compat._patched == declared
