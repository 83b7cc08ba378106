"""Fixtures of the tests of the API server: the processor of a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.unit.api.tiny_processor import Sender
from vllm_autoprune.selftest.backbones import build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def without_cache(folder: Any) -> Sender:
    return Sender(folder, budget=8)


@pytest.fixture
def sender(folder: Any) -> Sender:
    return Sender(folder, budget=8).with_cache()
