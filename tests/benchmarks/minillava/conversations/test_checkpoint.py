"""The written checkpoint: the first one's files with other weights of the language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.minillava.conversations.arms import FULL, Arm
from benchmarks.minillava.conversations.checkpoint import LANGUAGE, write_checkpoint
from benchmarks.minillava.conversations.draw import draw_conversations
from benchmarks.minillava.conversations.scoring import choose_rows, encode_turns, score_turns
from benchmarks.minillava.reader import Reader
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


def test_the_committed_file_has_projector_and_language_model_only() -> None:
    first, own = load_file(LLAVA / "model.safetensors"), load_file(LANGUAGE)

    assert own.keys() == {name for name in first if not name.startswith("vision_tower.")}
    assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
    assert LANGUAGE.stat().st_size < 8e6


def test_later_turns_are_answered_and_recall_wins_back_what_they_lose(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    reader, conversations = Reader(tmp_path), draw_conversations("validation", 24)
    turns = encode_turns(reader, conversations)
    plain, recall = Arm("minillava-split", 8), Arm("minillava-split", 8, 8)

    right = {
        arm: score_turns(reader, conversations, choose_rows(arm, conversations, turns)).right
        for arm in (FULL, plain, recall)
    }

    share = {arm: scored[:, 1:].float().mean().item() for arm, scored in right.items()}
    assert share[FULL] > 0.85
    assert share[plain] < share[FULL] - 0.2
    assert share[recall] > share[plain] + 0.15
