"""The whole training on tiny batches: one seed gives one checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from benchmarks.minillava.training.stages import RANKS
from benchmarks.miniqwen.training.run import STAGES, Run, train_rank


def _run(folder: Path) -> Run:
    (folder / "work").mkdir(parents=True)
    stages = tuple(replace(stage, images=2) for stage in STAGES)
    return Run(folder / "out", folder / "work", steps_scale=0.0005, stages=stages)


def _train(run: Run) -> str:
    """Train in forked ranks, which need not import torch again; digest of the weights."""
    (run.work / "meet").unlink(missing_ok=True)
    mp.start_processes(train_rank, (run,), RANKS, start_method="fork")
    return hashlib.sha256((run.out / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.timeout(300)
def test_one_seed_gives_one_checkpoint_in_one_pass_or_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    whole = _train(run)
    (run.work / "questions.pt").unlink()  # as if the run had stopped after the phrases
    resumed = _train(replace(run, out=tmp_path / "again", resume=True))
    assert capfd.readouterr().out.count("[phrases] resumed at step 1") == 1
    assert resumed == whole
