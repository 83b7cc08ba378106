"""The written checkpoint: the first one's files with other weights of the language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.minillava.conversations.checkpoint import write_checkpoint
from benchmarks.minillava.split import CHECKPOINT, CLIP, LLAVA

_NAME = "language_model.model.norm.weight"


def test_only_the_trained_tensors_differ_from_the_first_checkpoint(tmp_path: Path) -> None:
    first = load_file(LLAVA / "model.safetensors")
    save_file({_NAME: first[_NAME] + 1}, tmp_path / "language.safetensors")

    write_checkpoint(tmp_path / "written", tmp_path / "language.safetensors")

    own = load_file(tmp_path / "written" / "llava" / "model.safetensors")
    assert own.keys() == first.keys()
    assert [name for name in own if not torch.equal(own[name], first[name])] == [_NAME]
    for path in (*CLIP.iterdir(), *LLAVA.glob("*.json"), LLAVA / "chat_template.jinja"):
        copied = tmp_path / "written" / path.relative_to(CHECKPOINT)
        assert copied.read_bytes() == path.read_bytes()


def test_tensors_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    save_file({"language_model.other": torch.zeros(1)}, tmp_path / "language.safetensors")

    with pytest.raises(ValueError, match=r"language_model\.other"):
        write_checkpoint(tmp_path / "written", tmp_path / "language.safetensors")
