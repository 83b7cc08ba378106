"""Fixtures of the unit tests: recorded registrations, captured log, tiny models, a processor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.serving.engine import built
from tests.serving.unit.sender import Sender
from tests.serving.unit.signal_models import HEAD, HEADS, HIDDEN, KEY_HEADS, LAYERS
from vllm_autoprune.serving import compat, startup
from vllm_autoprune.serving.api import engine_requests, request_checks
from vllm_autoprune.serving.compat import runner_v1, worker


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that are registered with vLLM: recorded, for other tests need stock vLLM."""
    architectures: list[str] = []
    monkeypatch.setattr(startup, "_active", set())
    monkeypatch.setattr(
        compat, "register_model", lambda name, where: architectures.append(name)
    )
    for owner, name in (
        (compat, "register_renderer"),
        (request_checks, "check_requests"),
        (engine_requests, "watch_requests"),
        (runner_v1, "request_positions_on_cpu"),
        (worker, "refuse_sleep"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    return architectures


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Log records of the plugin; vLLM's logger above it does not propagate."""
    logger = logging.getLogger("vllm.autoprune")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    return caplog


@pytest.fixture(scope="session")
def folder() -> Any:
    return built("qwen2_5_vl")


@pytest.fixture
def sender(folder: Any) -> Sender:
    return Sender(folder, budget=8).with_cache()


@pytest.fixture(scope="module")
def llama() -> Any:
    """Transformers' own model with grouped key heads, eager, so that it shows its attention."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    model = LlamaModel(config)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)  # defaults of norms would hide a missing one
    return model.eval().requires_grad_(False)
