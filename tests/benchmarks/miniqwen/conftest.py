"""An untrained checkpoint, for tests that do not depend on trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.miniqwen.training.export import write_checkpoint
from benchmarks.miniqwen.training.models import build_model
from benchmarks.miniqwen.vocabulary import language_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as training writes it."""
    torch.manual_seed(0)
    words = language_tokenizer()
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, build_model(words), words)
    return folder
