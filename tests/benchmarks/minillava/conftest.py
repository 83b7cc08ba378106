"""An untrained checkpoint, for tests that do not depend on trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.training.export import write_checkpoint
from benchmarks.minillava.training.models import Projector, build_clip, build_language_model
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `llava` and `clip` as training writes them."""
    torch.manual_seed(0)
    canvas, clip_words, words = Canvas(), clip_tokenizer(), language_tokenizer()
    folder = tmp_path_factory.mktemp("checkpoint")
    model, clip = build_language_model(words), build_clip(clip_words, canvas)
    write_checkpoint(folder, canvas, clip, Projector(), model, clip_words, words)
    return folder
