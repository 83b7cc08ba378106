"""Triton kernels against torch: by Triton's interpreter, up to the binary, and on a GPU.

Everything but the tests on a GPU runs in processes of :mod:`tests.ops.kernel_process`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.kernel_inputs import (
    EXCHANGE,
    GREEDY_MAP,
    WALK,
    GreedyMapInputs,
    entering_tokens,
    walk_picks,
)
from vllm_autoprune.ops.dpp import fastest_implementation
from vllm_autoprune.ops.exchange import fastest_exchange
from vllm_autoprune.ops.exchange_torch import Exchange, exchange_torch
from vllm_autoprune.ops.farthest import fastest_walk
from vllm_autoprune.ops.farthest_torch import Walk, walk_torch
from vllm_autoprune.ops.greedy import greedy_map_torch


def run_process(command: str, **environment: str) -> dict[str, Any]:
    """What a command of :mod:`tests.ops.kernel_process` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.kernel_process", command],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@cache
def compared() -> dict[str, Any]:
    """Picks of all inputs, in torch and in each form of the kernels."""
    return run_process("compare", TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "name",
    [
        *(f"greedy MAP: {name}" for name in GREEDY_MAP),
        *(f"farthest points: {name}" for name in WALK),
    ],
)
def test_picks_of_triton_equal_those_of_torch(name: str) -> None:
    in_torch, *in_triton = compared()[name]
    assert len(in_triton) >= 2
    assert all(picks == in_torch for picks in in_triton)
    if not name.endswith("NaN"):
        assert all(len(set(row)) == len(row) > 0 for row in in_torch)
    if ": rounded 1" in name:
        assert [row[0] for row in in_torch] == [0] * len(in_torch)


@pytest.mark.parametrize("name", EXCHANGE)
def test_exchanges_by_triton_equal_those_of_torch(name: str) -> None:
    in_torch, *in_triton = compared()[f"exchange: {name}"]
    assert len(in_triton) == 2
    assert all(entering == in_torch for entering in in_triton)
    for row in in_torch:
        made = [token for token in row if token >= 0]
        assert row == made + [-1] * (len(row) - len(made)), (
            "made after one that was not"
        )
        assert len(set(made)) == len(made)


def test_exchanges_of_the_inputs_end_early_late_and_at_once() -> None:
    made = {
        sum(token >= 0 for token in row) / len(row)
        for call in EXCHANGE.values()
        for row in entering_tokens(call, exchange_torch)
    }
    assert {0.0, 1.0} < made


@pytest.mark.timeout(3600)  # 300 images take minutes alone, on a busy machine many
@pytest.mark.parametrize(
    "images", [12, pytest.param(300, marks=pytest.mark.exhaustive)]
)
def test_picks_of_triton_equal_those_of_torch_at_random_sizes(images: int) -> None:
    differ = run_process(f"sizes-{images}", TRITON_INTERPRET="1")
    expected = {"greedy MAP": 0, "farthest points": 0, "exchange": 0}
    assert differ == {"images": images, **expected}


@pytest.mark.parametrize(
    "gpu",
    [90, *(pytest.param(gpu, marks=pytest.mark.exhaustive) for gpu in (80, 100, 120))],
)  # an H100; an A100, a B200 and an RTX 5090
def test_the_kernels_compile_for_a_gpu(gpu: int, tmp_path: Path) -> None:
    used = run_process(
        f"compile-{gpu}", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    assert len(used) == 5 + 4 + 4
    assert max(kernel["spilled"] for kernel in used.values()) <= 256
    read = [used[name]["vector loads"] for name in used if name.startswith("greedy")]
    assert min(read) >= 4, "rows of factors are read one number at a time"
    # Two programs of a shared image fit on a multiprocessor.
    assert used["greedy MAP, 4096 → 512"]["registers"] <= 128


def test_no_image_compiles_a_kernel_once_that_is_done_for_the_largest(
    tmp_path: Path,
) -> None:
    """Six blocks: greedy MAP, also shared; farthest points in five forms each; exchange."""
    counts = run_process("count", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert counts == {"compiled": 7 + 6 * 5 + 6, "missing": 0}


def test_torch_is_used_on_a_cpu_and_on_a_gpu_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    cuda = torch.device("cuda")
    assert fastest_implementation(cpu, 64, 8) is greedy_map_torch
    assert fastest_walk(cpu, 64) is walk_torch
    assert fastest_exchange(cpu, 64) is exchange_torch
    for kernel in ("dpp_triton", "farthest_triton", "exchange_triton"):
        monkeypatch.setitem(sys.modules, f"vllm_autoprune.ops.{kernel}", None)
    assert fastest_implementation(cuda, 64, 8) is greedy_map_torch
    assert fastest_walk(cuda, 64) is walk_torch
    assert fastest_exchange(cuda, 64) is exchange_torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inputs", GREEDY_MAP.values(), ids=GREEDY_MAP)
def test_picks_on_a_gpu_equal_torch(inputs: GreedyMapInputs) -> None:
    from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works

    assert works()
    assert inputs.picks(greedy_map_triton, "cuda") == inputs.picks(greedy_map_torch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("walk", WALK.values(), ids=WALK)
def test_farthest_points_on_a_gpu_equal_torch(walk: Walk) -> None:
    from vllm_autoprune.ops.farthest_triton import walk_triton, works

    assert works()
    assert walk_picks(walk, walk_triton, "cuda") == walk_picks(walk, walk_torch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("call", EXCHANGE.values(), ids=EXCHANGE)
def test_exchanges_on_a_gpu_equal_torch(call: Exchange) -> None:
    from vllm_autoprune.ops.exchange_triton import exchange_triton, works

    assert works()
    by_kernel = entering_tokens(call, exchange_triton, "cuda")
    assert by_kernel == entering_tokens(call, exchange_torch)
