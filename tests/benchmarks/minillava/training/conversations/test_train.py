"""The stage on conversations: one seed gives one file, in one pass or resumed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.split import LLAVA
from benchmarks.minillava.training import stages
from benchmarks.minillava.training.conversations import train
from benchmarks.minillava.training.conversations.batch import conversation_batch
from benchmarks.minillava.training.conversations.train import LANGUAGE, STAGE, Run, train_rank
from benchmarks.minillava.training.language import LanguageBatch
from benchmarks.minillava.training.stages import RANKS


def _run(folder: Path) -> Run:
    (folder / "work").mkdir(parents=True)
    return Run(folder / "out", folder / "work", stage=replace(STAGE, steps=3, images=1))


def _train(run: Run) -> None:
    """Train in forked ranks, which need not import torch again; each uses a single thread."""
    (run.work / "meet").unlink(missing_ok=True)
    mp.start_processes(train_rank, (run,), RANKS, start_method="fork")


@pytest.mark.timeout(300)
def test_one_seed_gives_one_language_model_in_one_pass_or_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def draw_two(
        seed: int, size: int, tokenizer: Tokenizer, canvas: Canvas, budget: int, recall: bool
    ) -> LanguageBatch:
        calls.append(seed)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return conversation_batch(seed, size, tokenizer, canvas, budget, recall)

    whole, stopped = _run(tmp_path / "whole"), _run(tmp_path / "stopped")
    _train(whole)
    monkeypatch.setattr(stages, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(train, "conversation_batch", draw_two)
    _train(stopped)  # ranks end at the third step, as after Ctrl-C
    assert not (stopped.out / LANGUAGE).exists()
    monkeypatch.setattr(train, "conversation_batch", conversation_batch)
    _train(replace(stopped, resume=True))

    assert "resumed at step 2" in capfd.readouterr().out
    one, other = load_file(whole.out / LANGUAGE), load_file(stopped.out / LANGUAGE)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.timeout(300)
def test_the_command_trains_projector_and_language_model_only(tmp_path: Path) -> None:
    command = "-m", "benchmarks.minillava.training.conversations", "--steps-scale", "0.001"
    folders = "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")
    ended = subprocess.run(
        [sys.executable, *command, *folders], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert "[conversations] 1/1 loss=" in ended.stdout
    first, own = load_file(LLAVA / "model.safetensors"), load_file(tmp_path / "out" / LANGUAGE)
    vision = {name for name in first if name.startswith("vision_tower.")}
    assert own.keys() == first.keys() - vision
    assert any(not torch.equal(own[name], first[name]) for name in own)
    assert all(own[name].dtype == torch.bfloat16 for name in own)
