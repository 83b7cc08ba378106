"""The whole training, a few steps of each stage: one seed, one pair of checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = "0.001"


def _train(folder: Path, *more: str) -> str:
    ended = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.minillava.train",
            "--out", str(folder / "out"), "--work", str(folder / "work"),
            "--steps-scale", STEPS, *more,
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def _weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "out").rglob("*.safetensors"))
    }


@pytest.mark.timeout(600)
def test_one_seed_gives_one_pair_of_checkpoints_in_one_pass_or_in_two(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    log = _train(whole)
    _train(resumed)
    for stage in ("questions.pt", "gaps.pt"):  # as if it had been stopped after the phrases
        (resumed / "work" / stage).unlink()
    (resumed / "out").rename(resumed / "first")
    again = _train(resumed, "--resume")

    found = _weights(whole)
    assert sorted(found) == [f"out/{n}/{m}/model.safetensors" for n in ("gaps", "whole")
                             for m in ("clip", "llava")]  # fmt: skip
    assert "[phrases] resumed at step 1" in again and "resumed" not in log
    assert _weights(resumed) == found
    assert found["out/gaps/llava/model.safetensors"] != found["out/whole/llava/model.safetensors"]
    assert found["out/gaps/clip/model.safetensors"] == found["out/whole/clip/model.safetensors"]
