"""The Triton form, on a machine without a GPU: by Triton's interpreter, and up to the binary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.ops import triton_cases
from vllm_autoprune.ops import dpp
from vllm_autoprune.ops.dpp_torch import greedy_map_torch

ROOT = Path(__file__).resolve().parents[2]
CASES = dict(triton_cases.cases())


def ran(what: str, **environment: str) -> dict[str, list[list[list[int]]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_cases", what],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    actual: dict[str, list[list[list[int]]]] = json.loads(done.stdout)
    return actual


@cache
def compared() -> dict[str, list[list[list[int]]]]:
    return ran("compare", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_picks_equal_the_torch_implementation(name: str) -> None:
    in_torch, in_triton = compared()[name]
    assert in_triton == in_torch
    assert all(len(set(row)) == len(row) > 0 for row in in_torch)
    if name.startswith("rounded 1"):
        assert [row[0] for row in in_triton] == [0] * len(in_triton)


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(gpu, id=f"sm_{gpu}", marks=[pytest.mark.exhaustive] if gpu < 90 else [])
        for gpu in triton_cases.GPUS
    ],
)
def test_the_kernel_compiles_for_a_gpu(gpu: int, tmp_path: Path) -> None:
    built = ran(f"compile-{gpu}", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert len(built) == 3


def test_tensors_on_the_cpu_go_to_torch() -> None:
    assert dpp._fastest_implementation(torch.device("cpu")) is greedy_map_torch


def test_torch_is_used_on_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_autoprune.ops.dpp_triton", None)
    assert dpp._fastest_implementation(torch.device("cuda")) is greedy_map_torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_picks_on_a_gpu_equal_torch(given: triton_cases.Inputs) -> None:
    from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works

    assert works()
    there = given.to("cuda")
    actual = greedy_map_triton(
        there.similarity, there.quality, there.count, there.anchors, there.eligible
    )
    assert actual.tolist() == given.in_torch()
