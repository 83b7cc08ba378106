"""Fixtures of the unit tests: recorded registrations, captured log, a tiny CLIP, a processor."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.unit import samples
from tests.serving.unit.samples import Sender
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving import compat, startup
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.compat import worker


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that are registered with vLLM: recorded, for other tests need stock vLLM."""
    architectures: list[str] = []
    monkeypatch.setattr(startup, "_active", set())
    monkeypatch.setattr(compat, "register_model", lambda name, where: architectures.append(name))
    for owner, name in (
        (compat, "register_renderer"),
        (compat, "check_requests"),
        (engine_requests, "watch_requests"),
        (worker, "request_positions_on_cpu"),
        (worker, "refuse_sleep"),
        # Names have their own test; looking them up here would import many vLLM modules.
        (startup, "require_hooks"),
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


@dataclass(frozen=True)
class TinyClip:
    """A random CLIP model and the folder it was saved to."""

    model: Any
    folder: Path


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> TinyClip:
    """A CLIP with both towers, a tokenizer and random weights."""
    from transformers import CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    model = CLIPModel(samples.clip_config()).eval()
    for weight in model.parameters():
        # The default initialisation leaves layer norms at 1 and 0, which hides a missing one.
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    samples.add_tokenizer(folder)
    return TinyClip(model, folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def without_cache(folder: Any) -> Sender:
    return Sender(folder, budget=8)


@pytest.fixture
def sender(folder: Any) -> Sender:
    return Sender(folder, budget=8).with_cache()
