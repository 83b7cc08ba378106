"""select: a policy on arrays from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tpdsl.samples import images
from vllm_autoprune import load_state, materialize, refine
from vllm_autoprune.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    tokens = images(seed=7)
    assert tokens.instruction is not None and tokens.cls_attention is not None
    path = tmp_path / "arrays.npz"
    np.savez(
        path,
        allow_pickle=False,
        features=tokens.features.numpy(),
        cls_attention=tokens.cls_attention.numpy(),
        patches=tokens.instruction.patches.numpy(),
        text=tokens.instruction.text.numpy(),
        segments=tokens.instruction.segments.numpy(),
        sign=np.array(tokens.instruction.sign),
    )
    return path


def test_indices_are_those_of_the_library(arrays: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out.npz"
    call = ["select", "autoprune", str(arrays), "--budget", "10"]
    assert main([*call, "--json", "-o", str(out)]) == 0
    records = json.loads(capsys.readouterr().out)
    expected = refine(materialize(load_state("autoprune"), 10), images(seed=7))
    assert [image["kept"] for image in records] == expected.indices.tolist()
    assert [image["reference"] for image in records] == expected.reference.tolist()
    with np.load(out, allow_pickle=False) as saved:
        assert set(saved.files) == {
            *("indices", "reference", "exchanged", "fallback", "features", "quality"),
        }
        assert torch.equal(torch.from_numpy(saved["features"]), expected.features)
        assert saved["indices"].tolist() == expected.indices.tolist()


def test_table_shows_the_reason_of_each_exchange(arrays: Path, capsys: Captured) -> None:
    assert main(["select", "autoprune", str(arrays), "--budget", "10"]) == 0
    output = capsys.readouterr().out
    assert "image 0, grid 6 x 6 x 1, fallback none" in output and "image 1" in output
    expected = refine(materialize(load_state("autoprune"), 10), images(seed=7))
    assert " ".join(map(str, expected.indices[0].tolist())) in output
    assert int(expected.exchanged.sum()) > 0 and "local_contrast_saliency" in output


def test_bad_arrays_are_reported(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, allow_pickle=False, features=np.ones((35, 4)))
    assert main(["select", "autoprune", str(path)]) == 1
    output = capsys.readouterr().err
    assert "grid: missing, and N = 35 is not a square" in output
    assert "patches: required but missing" in output
