"""The whole training on tiny batches: one seed gives one pair of checkpoints."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from benchmarks.minillava.training.scratch import STAGES, Run, train_rank
from benchmarks.minillava.training.stages import RANKS


def _run(folder: Path) -> Run:
    (folder / "work").mkdir(parents=True)
    # Two images show every kind of label; more of them only take longer.
    stages = tuple(replace(stage, images=2) for stage in STAGES)
    return Run(folder / "out", folder / "work", steps_scale=0.0005, stages=stages)


def _train(run: Run) -> None:
    """Train in forked ranks, which need not import torch again; each uses a single thread."""
    (run.work / "meet").unlink(missing_ok=True)
    mp.start_processes(train_rank, (run,), RANKS, start_method="fork")


def _weights(folder: Path) -> dict[str, str]:
    """Digest of every weight file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


@pytest.mark.timeout(300)
def test_one_seed_gives_one_pair_of_checkpoints_in_one_pass_or_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, first = _run(tmp_path / "whole"), _run(tmp_path / "resumed")
    _train(whole)
    _train(first)
    for name in ("questions.pt", "gaps.pt"):  # as if the run had stopped after the phrases
        (first.work / name).unlink()
    resumed = replace(first, out=tmp_path / "again", resume=True)
    _train(resumed)

    weights = _weights(whole.out)
    assert sorted(weights) == [f"{n}/{m}/model.safetensors" for n in ("gaps", "whole")
                               for m in ("clip", "llava")]  # fmt: skip
    assert capfd.readouterr().out.count("[phrases] resumed at step 1") == 1
    assert _weights(first.out) == weights
    assert _weights(resumed.out) == weights
    assert weights["gaps/llava/model.safetensors"] != weights["whole/llava/model.safetensors"]
    assert weights["gaps/clip/model.safetensors"] == weights["whole/clip/model.safetensors"]


def test_spawned_ranks_can_import_what_they_run() -> None:
    # Functions of a package's __main__ cannot be unpickled in a spawned process.
    assert not train_rank.__module__.endswith("__main__")
    assert pickle.loads(pickle.dumps(train_rank)) is train_rank
