"""An untrained checkpoint, for what does not depend on what was learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.minillava.export import export
from benchmarks.minillava.language import Projector, language_model
from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.towers import clip_model
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llava` and `clip` as training would write them."""
    torch.manual_seed(0)
    canvas, eyes, words = Canvas(), clip_tokenizer(), language_tokenizer()
    folder = tmp_path_factory.mktemp("checkpoint")
    model = language_model(words)
    export(folder, canvas, clip_model(eyes, canvas), Projector(), model, eyes, words)
    return folder
