"""`python -m benchmarks.cost gpu`: what a machine with a GPU shows in eight minutes, as tables.

`python -m benchmarks.cost selection gpu` measures the loops alone, at more sizes, as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.common.report import log_progress
from benchmarks.cost.selection import (
    LLAVA,
    LLAVA_NEXT,
    Size,
    TokenSource,
    build_published_kernel,
    draw_images,
    measure_alternately,
    select_greedily,
)
from vllm_autoprune.ops import dpp_triton
from vllm_autoprune.ops.dpp_torch import greedy_map_torch
from vllm_autoprune.ops.similarity import cosines
from vllm_autoprune.report import Table
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

NO_GPU = 2
"""Exit status where there is no GPU."""
SECONDS = 440
"""Seconds that all of the tables may take."""
_SERVING_SECONDS = 240
"""Seconds that two servers of LLaVA-1.5-7B need for their starts and requests."""
_AIM = 5.0
"""How many times as fast as the published loop the Triton form has to be."""
_SIZES = (LLAVA[1], Size(576, 1, 8, 64), LLAVA_NEXT[1], Size(576, 5, 8, 320))
_TIMES, _FASTER = "seconds (median, quartiles)", "published loop / triton loop"
_AGREEMENT = "picks as the published loop's"


def find_missing_requirement() -> str | None:
    """Why this machine cannot measure; None where it can."""
    if not torch.cuda.is_available():
        return "no CUDA device here; `python -m benchmarks.cost selection cpu` needs none"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def _measure_loops(size: Size, rounds: int, device: str = "cuda") -> dict[str, Any]:
    """Times of the loops on one kernel, and of selections from features to indices."""
    images = draw_images(size, device=device)
    count = size.kept // size.tiles
    tiled = images.features.view(size.batch * size.tiles, size.per_tile, -1)
    kernel = build_published_kernel(images)
    # With q_j = r_j, L_jj = q_j^2; and S = L / (q_i q_j) are the cosines.
    quality = kernel.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    similarity = cosines(tiled, tiled.norm(dim=-1, keepdim=True))
    triton = dpp_triton.greedy_map_triton

    def select_with_triton() -> object:
        return triton(cosines(tiled, tiled.norm(dim=-1, keepdim=True)), quality, count)

    times = measure_alternately(
        {
            "published loop": partial(select_greedily, kernel, count),
            "torch loop": partial(greedy_map_torch, similarity, quality, count),
            "triton loop": partial(triton, similarity, quality, count),
            "published selection": images.select_as_published,
            "triton selection, relevance given": select_with_triton,
        },
        rounds,
    )
    log_progress(f"{size}: loops")
    picks = triton(similarity, quality, count)

    def agreement(other: torch.Tensor) -> float:
        """Share of the picks that both have in common."""
        return float((picks[:, :, None] == other[:, None, :]).any(dim=2).float().mean())

    faster = median(times["published loop"]) / median(times["triton loop"])
    return {
        _TIMES: {name: [median(t), *quantiles(t, n=4)[::2]] for name, t in times.items()},
        _FASTER: faster,
        "aim met": faster >= _AIM,
        _AGREEMENT: agreement(select_greedily(kernel, count)),
        "picks as the torch form's": agreement(greedy_map_torch(similarity, quality, count)),
    }


def _measure_selection_loops(quick: bool) -> None:
    """Print the loops at LLaVA-1.5's and LLaVA-NeXT's shapes, and the smallest and largest N."""
    if not dpp_triton.works():
        raise RuntimeError("Triton does not work on this machine; the log says why")
    shapes = (
        [LLAVA[1]] if quick else [Size(64, 1, 1, 8), *LLAVA, *LLAVA_NEXT, Size(2880, 1, 1, 320)]
    )
    sizes = [
        Size(s.per_tile, s.tiles, b, s.kept)
        for s in shapes
        for b in (1, 2, 4, 8)[: 1 if quick else 4]
    ]
    results = {str(size): _measure_loops(size, 5 if quick else 31) for size in sizes}
    holds = all(result["aim met"] for result in results.values())
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "aim": f"the Triton form at least {_AIM:g} times as fast as the published loop",
        "sizes": results,
        "verdict": "holds" if holds else "does not hold",
    }
    print(json.dumps(report, indent=1))


def format_loops(sizes: Sequence[Size], rounds: int, device: str = "cuda") -> str:
    """A table of the greedy loops: milliseconds of each, and whether they pick the same tokens."""
    rows = []
    for size in sizes:
        result = _measure_loops(size, rounds, device)
        times = (result[_TIMES][f"{name} loop"][0] for name in ("published", "torch", "triton"))
        faster, same = f"{result[_FASTER]:.1f} x", f"{result[_AGREEMENT]:.1%}"
        rows.append((str(size), *(f"{1000 * seconds:.2f}" for seconds in times), faster, same))
    columns = ("greedy MAP, ms", "published", "torch", "Triton", "faster", "picks as published")
    return Table("", columns, rows).markdown()


def format_policies(sizes: Sequence[Size], rounds: int, device: str = "cuda") -> str:
    """A table of every base policy alone, in milliseconds an image; layers are not included."""
    names = sorted(BASE_POLICIES)
    cells = {name: [f"`{name}`"] for name in names}
    for size in sizes:
        source = TokenSource(size, device)
        times = measure_alternately({n: partial(source.select, n) for n in names}, rounds)
        for name in names:
            cells[name].append(f"{1000 * median(times[name]):.2f}")
        log_progress(f"{size}: {len(names)} base policies")
    return Table("", ("base policy, ms", *map(str, sizes)), list(cells.values())).markdown()


def add_arguments(parser: argparse.ArgumentParser, command: str = "gpu") -> None:
    """Add the options; each has a default."""
    parser.add_argument("--quick", action="store_true", help="a few rounds, and no server")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the servers")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything possible is measured, 2 without a GPU."""
    deadline = time.monotonic() + SECONDS
    reason = find_missing_requirement()
    if reason is not None:
        print(f"{options.command}: {reason}", file=sys.stderr)
        return NO_GPU
    if options.command == "selection":
        _measure_selection_loops(options.quick)
        return 0
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    if dpp_triton.works():
        print(format_loops(_SIZES, 5 if options.quick else 21), "\n")
    else:
        print("Triton does not work on this machine; the log says why.\n")
    print(format_policies(_SIZES[::2], 3 if options.quick else 9), "\n")
    remaining = deadline - time.monotonic()
    reasons = {
        "--quick": options.quick,
        "vLLM is not installed": importlib.util.find_spec("vllm") is None,
        f"{remaining:.0f} s are left, and two servers need {_SERVING_SECONDS} s": (
            remaining < _SERVING_SECONDS
        ),
    }
    if any(reasons.values()):
        named = "; ".join(reason for reason, holds in reasons.items() if holds)
        print(f"Served requests are not measured: {named}.")
        return 0
    # LLaVA-1.5-7B of full depth with random weights, stock and pruned.
    from benchmarks.cost import efficiency

    parser = argparse.ArgumentParser()
    efficiency.add_arguments(parser)
    chosen = ["--model", "llava-1.5-7b", "--layers", "32", "--policies", ""]
    arguments = [*chosen, "--requests", "10", "--out", str(options.out)]
    return efficiency.run(parser.parse_args(arguments, argparse.Namespace(command="efficiency")))
