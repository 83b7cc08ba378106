"""Start-up: settings on the way from vLLM's configuration to its processes.

This module as a command starts up and forks, in a process of its own because tests have one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from prometheus_client import REGISTRY

from tests.serving.unit.configurations import vllm_config
from tests.serving.unit.samples import served
from vllm_autoprune import ConfigError, __version__, load_state
from vllm_autoprune.serving import compat, plugin
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.startup import apply_settings
from vllm_autoprune.tpdsl.loading import shipped_states

# ---- modes of the server ----


def test_a_mistake_ends_the_command_line_with_one_message_and_raises_in_python(
    registered: list[str],
) -> None:
    config = vllm_config({"state": "nowhere", "budget": "x", "from_flags": True})
    with pytest.raises(SystemExit) as caught:
        apply_settings(config)
    message = str(caught.value.code)
    assert message.startswith("\nvllm-autoprune: cannot serve pruned: 2 problems")
    assert "--autoprune-state nowhere" in message and "--autoprune-budget" in message
    assert served_state(config.model_config) is None and registered == []
    for settings in ({"state": "nowhere"}, "autoprune"):
        with pytest.raises(ConfigError):
            apply_settings(vllm_config(settings))


def test_the_metric_of_the_served_state_tells_replicas_apart() -> None:
    replicas: list[tuple[str, str, dict[str, object]]] = [
        ("trim", "16", {}),
        ("norm", "16", {}),
        ("norm", "1/8", {}),
        ("norm", "1/8", {"recall": 4}),
    ]
    for state, budget, others in (*replicas, replicas[0]):
        apply_settings(vllm_config({"state": state, "budget": budget, **others}))
    (metric,) = (m for m in REGISTRY.collect() if m.name == "autoprune_info")
    labels = [sample.labels for sample in metric.samples if sample.value == 1]
    settings = {sample["settings"]: sample for sample in labels}
    for state, budget, _ in replicas:
        expected = {
            "digest": load_state(state).digest,
            "version": __version__,
            "state": state,
            "budget": budget,
        }
        same = [n for n, found in settings.items() if expected.items() <= found.items()]
        assert len(same) == (2 if budget == "1/8" else 1)


@pytest.mark.parametrize("budget", [None, 16, "1/8"])
def test_a_server_without_a_budget_says_which_to_start_with(
    budget: int | str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.autoprune"):
        apply_settings(vllm_config({"state": "norm", "budget": budget}))
    hint = "K = 32 is the state's own. To start with, this model is served at"
    assert (hint in caplog.text) == (budget is None)


@pytest.mark.compat
def test_the_state_stays_out_of_the_compile_hash() -> None:
    """Compiled graphs do not depend on it, so another state must not compile them anew."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.utils import get_hash_factors, hash_factors

    def hashed(**settings: object) -> str:
        config: Any = VllmConfig.__new__(VllmConfig)
        model = SimpleNamespace(**model_fields, compute_hash=lambda: "model")
        additional = {"theirs": 1, **settings}
        vars(config).update(
            {**vars(stock), "model_config": model, "additional_config": additional}
        )
        if settings:
            apply_settings(config)
            assert (
                config.additional_config == {"theirs": 1} and "autoprune" in additional
            )
        return str(config.compute_hash())

    stock = VllmConfig()
    model_fields = vars(vllm_config().model_config)
    for settings in ({"state": "autoprune"}, {"state": "autoprune", "budget": 64}):
        assert hashed(autoprune=settings) == hashed()
    # A model config hashes only the fields it declares.
    bare = ModelConfig.__new__(ModelConfig)
    vars(bare).update(
        dict.fromkeys(field.name for field in dataclasses.fields(ModelConfig))
    )
    before = hash_factors(get_hash_factors(bare, set()))
    compat.attach(bare, "autoprune", served())
    assert hash_factors(get_hash_factors(bare, set())) == before


@pytest.mark.parametrize(
    ("cache_dtype", "kv_bytes"),
    [("auto", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e5m2", 1)]
    + [(name, None) for name in ("nvfp4", "turboquant_3bit_nc", "ultraquant_4bit")]
    + [(f"{name}_per_token_head", None) for name in ("int4", "int8", "fp8")],
)
def test_bytes_of_a_token_are_known_only_where_a_number_takes_those_of_its_dtype(
    cache_dtype: str, kv_bytes: int | None
) -> None:
    """As vLLM allots them where a backend changes nothing; 4 layers, 6 heads of 32 numbers."""
    config = vllm_config({"state": "divprune"})
    config.cache_config.cache_dtype = cache_dtype
    apply_settings(config)
    state = served_state(config.model_config)
    assert state is not None
    assert state.kv_bytes == (None if kv_bytes is None else 2 * 4 * 6 * 32 * kv_bytes)


def test_bytes_of_a_token_are_not_known_where_layers_differ() -> None:
    config = vllm_config({"state": "divprune"})
    vars(config.cache_config).update(
        cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]
    )
    apply_settings(config)
    state = served_state(config.model_config)
    assert state is not None and state.kv_bytes is None


def test_bytes_are_published_only_where_those_of_a_token_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Mock()
    monkeypatch.setattr(engine_requests, "make_kv_bytes_counter", counter)
    for kv_bytes in (None, 10):
        plans = [ItemPlan(8, (0, 0), tokens=100)]
        images = [TokenCount(100)]
        counts = engine_requests.RequestCounts("test", "state", kv_bytes, images, plans)
        counts.add([])
    assert counter.mock_calls == [call(), call().inc(920)]


_THREADS = 2
"""Threads of the process that forks; with one, nothing could hang."""


def _use_threads() -> None:
    """Run a parallel region of torch's own, and one of its BLAS."""
    torch.ones(1 << 22).add(1)
    torch.ones(512, 512) @ torch.ones(512, 512)


def _start_up_and_fork() -> int:
    """Exit status of a forked child that uses threads; negative where it hung and was killed."""
    for state in shipped_states():
        apply_settings(vllm_config({"state": state}))
    assert torch.get_num_threads() == _THREADS
    child = multiprocessing.get_context("fork").Process(target=_use_threads)
    child.start()
    child.join(timeout=30)
    child.kill()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.slow
def test_an_engine_core_that_is_forked_after_start_up_can_use_threads() -> None:
    """As `LLM()` does on CUDA: libgomp hangs in a child whose parent ran a parallel region."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.unit.test_startup"],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "OMP_NUM_THREADS": str(_THREADS)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_the_environment_keeps_the_plugin_out_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, off in (
        ("1", True),
        ("true", True),
        (" YES ", True),
        ("0", False),
        ("", False),
    ):
        monkeypatch.setenv(plugin.DISABLE, value)
        assert plugin.disabled() is off


if __name__ == "__main__":
    sys.exit(_start_up_and_fork())
