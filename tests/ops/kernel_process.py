"""Triton kernels in a process of their own: Triton reads its environment when it declares one.

Run as a module. ``compare`` prints the picks of each kernel, in its forms, and those of torch;
``sizes-300`` how often they differ at so many random sizes; ``compile-90`` what the compiled
kernels use on a GPU of that compute capability; ``count`` what is compiled at start-up and for
images of many sizes.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.ops.interpreter import imitate_gpu
from tests.ops.kernel_inputs import (
    EXCHANGE,
    GREEDY_MAP,
    WALK,
    GreedyMapInputs,
    draw_exchange,
    draw_kernel,
    entering_tokens,
    walk_picks,
)
from vllm_autoprune.ops.compilation import compile_for
from vllm_autoprune.ops.exchange_torch import Exchange, exchange_torch
from vllm_autoprune.ops.farthest import distances
from vllm_autoprune.ops.farthest_torch import Chosen, Walk, Weighting, walk_torch
from vllm_autoprune.ops.greedy import Conditioned, greedy_map_torch
from vllm_autoprune.ops.kernels import block_for, warps_for


class _Recorder:
    """In the place of the kernel: keeps what Triton would compile for launches on an H100."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, backend
        )
        self.variants: set[str] = set()

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **options: object) -> None:
        _, specialization, parsed = self._bind(*arguments, **options)
        self.variants.add(repr((specialization, parsed)))


class _CudaOnHost(TorchFunctionMode):
    """Makes tensors for a GPU on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        return func(
            *args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
        )


def _count_variants() -> dict[str, int]:
    """Variants ``compiled`` for images of up to 4,096 tokens, and ``missing`` for 500 such calls.

    Sizes are uniform in their logarithm; every other tensor begins at an address that is not a
    multiple of 16.
    """
    from vllm_autoprune.ops import dpp_triton, exchange_triton, farthest_triton

    dpp_triton._greedy_map = greedy_map = _Recorder(dpp_triton._greedy_map)
    exchange_triton._exchange = exchange = _Recorder(exchange_triton._exchange)
    farthest_triton._farthest = farthest = _Recorder(farthest_triton._farthest)
    with _CudaOnHost():
        compile_for(4096, torch.device("cuda"))
    compiled = greedy_map.variants | farthest.variants | exchange.variants
    source = torch.Generator().manual_seed(0)
    for number in range(500):
        tokens = int(4096 ** float(torch.rand(1, generator=source)))
        count = int(torch.randint(1, tokens + 1, (1,), generator=source))
        skipped = number % 2
        similarity = torch.empty(tokens * tokens + skipped)[skipped:].view(
            1, tokens, tokens
        )
        quality = torch.empty(tokens + skipped)[skipped:].view(1, tokens)
        anchors = torch.zeros(1, number % 18, dtype=torch.int64) if number % 3 else None
        eligible = torch.empty_like(quality, dtype=torch.bool) if number % 5 else None
        conditioned = Conditioned(torch.empty(1, number % 19, tokens), quality)
        dpp_triton.greedy_map_triton(
            similarity,
            quality,
            min(count, 64) if number % 4 else count,
            anchors,
            eligible,
            conditioned if number % 7 else None,
        )
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        distance = similarity.to(dtype)
        chosen = Chosen(quality, torch.empty_like(quality, dtype=torch.bool))
        farthest_triton.walk_triton(Walk(distance, chosen, count))
        leading = torch.zeros(1, count, dtype=torch.int64) if number % 3 else None
        weighting = Weighting(quality, quality, quality, 0.0)
        walk = Walk(similarity, chosen, count, weighting, leading)
        farthest_triton.walk_triton(walk)
        leaving = torch.zeros(1, min(count, 640), dtype=torch.int64)
        least = torch.empty(1, min(count, 640))
        pool = torch.empty_like(quality, dtype=torch.bool)
        call = Exchange(similarity, quality, quality, pool, leaving, least)
        exchange_triton.exchange_triton(replace(call, diversity=number % 3 / 2))
    every = greedy_map.variants | farthest.variants | exchange.variants
    return {"compiled": len(compiled), "missing": len(every - compiled)}


def _compare() -> dict[str, tuple[list[list[int]], ...]]:
    """Picks of each input: in torch, and by the kernel in several forms."""
    from vllm_autoprune.ops.dpp_triton import Launch, greedy_map_triton
    from vllm_autoprune.ops.exchange_triton import exchange_triton
    from vllm_autoprune.ops.farthest_triton import walk_triton

    imitate_gpu()
    compared = {}
    for name, inputs in GREEDY_MAP.items():
        # Programs of 16 tokens, so that few programs share a small image.
        programs = -(-inputs.quality.shape[1] // 16)
        forms = [Launch.of(128, 1), Launch(1024), Launch(16, max(2, programs))]
        if inputs.quality.shape[1] > 128:
            forms = [Launch(1024), Launch(128, 5)]
        compared[f"greedy MAP: {name}"] = (
            inputs.picks(greedy_map_torch),
            *(inputs.picks(partial(greedy_map_triton, launch=form)) for form in forms),
        )
    for name, walk in WALK.items():
        compared[f"farthest points: {name}"] = (
            walk_picks(walk, walk_torch),
            walk_picks(walk, walk_triton),
            walk_picks(walk, partial(walk_triton, block=16)),
        )
    for name, call in EXCHANGE.items():
        compared[f"exchange: {name}"] = (
            entering_tokens(call, exchange_torch),
            entering_tokens(call, exchange_triton),
            entering_tokens(call, partial(exchange_triton, block=16)),
        )
    return compared


def _compare_sizes(number: int) -> dict[str, int]:
    """How many of ``number`` random images each kernel picks differently from torch."""
    from vllm_autoprune.ops.dpp_triton import Launch, greedy_map_triton
    from vllm_autoprune.ops.exchange_triton import exchange_triton
    from vllm_autoprune.ops.farthest_triton import walk_triton

    imitate_gpu()
    source = random.Random(0)
    differ = {"images": number, "greedy MAP": 0, "farthest points": 0, "exchange": 0}
    for seed in range(number):
        tokens = source.randint(1, 48)
        # Less than half of the rank: beyond it, rounding decides between gains.
        count = source.randint(1, min(tokens, 24))
        similarity, quality = draw_kernel(seed, source.randint(1, 2), tokens, rank=64)
        inputs = GreedyMapInputs(similarity, quality, count)
        launch = source.choice((Launch(128), Launch(16, 3)))
        picks = inputs.picks(partial(greedy_map_triton, launch=launch))
        differ["greedy MAP"] += picks != inputs.picks(greedy_map_torch)
        distance = distances(similarity)
        floor = source.choice((0.0, 0.3))
        weighting = Weighting(quality, distance.amin(dim=1), quality, floor)
        walk = Walk(distance, Chosen.none(quality), count, weighting)
        block = source.choice((16, 128))
        by_kernel = walk_picks(walk, partial(walk_triton, block=block))
        differ["farthest points"] += by_kernel != walk_picks(walk, walk_torch)
        call = draw_exchange(seed, tokens, count)
        by_kernel = entering_tokens(call, partial(exchange_triton, block=block))
        differ["exchange"] += by_kernel != entering_tokens(call, exchange_torch)
    return differ


def _compile(gpu: int) -> dict[str, dict[str, int]]:
    """What the kernels of several sizes use on a GPU of a compute capability."""
    from vllm_autoprune.ops.dpp_triton import Launch, _greedy_map
    from vllm_autoprune.ops.exchange_triton import _exchange
    from vllm_autoprune.ops.farthest_triton import _farthest

    used = {}
    for tokens, count in ((64, 8), (576, 64), (2880, 64), (4096, 512), (32768, 4096)):
        launch = Launch.of(tokens, count)
        constants = {
            "block": launch.block,
            "rows": launch.rows,
            "shared": launch.shared,
        }
        used[f"greedy MAP, {tokens} → {count}"] = _resources(
            _greedy_map, constants, launch.warps, gpu
        )
    walks = {"weighted": True, "led": True}
    for tokens in (64, 576, 4096, 32768):
        block = block_for(tokens)
        used[f"farthest points, {tokens}"] = _resources(
            _farthest, {**walks, "block": block}, warps_for(block), gpu
        )
        used[f"exchange, {tokens}"] = _resources(
            _exchange, {"block": block}, warps_for(block), gpu
        )
    return used


_TYPES = (
    dict.fromkeys(("eligible", "taken", "pool"), "*i1")
    | dict.fromkeys(("anchors", "leading", "picks", "leaving", "entering"), "*i64")
    | {"arrivals": "*i32"}
    | dict.fromkeys(("tokens", "programs", "count", "forced", "fixed"), "i32")
    | dict.fromkeys(("residual_image_stride", "residual_stride", "limited"), "i32")
    | dict.fromkeys(("exhausted", "divisor", "huge", "unit", "tie", "floor"), "fp32")
    | dict.fromkeys(("most_similar", "relevance", "diversity"), "fp32")
)
"""Types of the arguments that are not pointers to float32."""


def _resources(
    kernel: Any, constants: dict[str, Any], warps: int, gpu: int
) -> dict[str, int]:
    """Vector loads, registers of a thread and bytes of a thread that do not fit in registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else _TYPES.get(name, "*fp32")
        for name in kernel.arg_names
    }
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in ("factors",)
        if name in kernel.arg_names
    }
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", gpu, 32),
        options={"num_warps": warps},
    )
    assert built.asm["cubin"]
    target = re.findall(r"\.target (\w+)", built.asm["ptx"])[0]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(built.asm["ptx"])
        ptx.flush()
        printed = subprocess.run(
            [assembler, "-v", f"-arch={target}", ptx.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return {
        "vector loads": built.asm["ptx"].count("ld.global.v4"),
        "registers": int(re.findall(r"Used (\d+) registers", printed)[0]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", printed)[0]),
    }


if __name__ == "__main__":
    command, _, number = sys.argv[1].partition("-")
    if command == "sizes":
        print(json.dumps(_compare_sizes(int(number))))
    elif command == "compile":
        print(json.dumps(_compile(int(number))))
    elif command == "count":
        print(json.dumps(_count_variants()))
    else:
        print(json.dumps(_compare()))
