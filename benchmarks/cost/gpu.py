"""`python -m benchmarks.cost gpu`: what a machine with a GPU shows in eight minutes, as tables.

The selection loops need torch and Triton, the base policies this package's dependencies as well,
and requests to a server vLLM. What is missing is named, and the rest is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch

from benchmarks.cost.selection import NO_GPU
from benchmarks.cost.selection import gpu as loops
from benchmarks.cost.selection.images import LLAVA, LLAVA_NEXT, Size
from benchmarks.cost.selection.timing import log_progress, measure_alternately

SIZES = (LLAVA[1], Size(576, 1, 8, 64), LLAVA_NEXT[1], Size(576, 5, 8, 320))

SECONDS = 440
"""Seconds that all of it may take."""

SERVING_SECONDS = 240
"""Seconds that two servers of LLaVA-1.5-7B need for their starts and requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--quick", action="store_true", help="a few rounds, and no server")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the servers")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything possible is measured, 2 without a GPU."""
    deadline = time.monotonic() + SECONDS
    reason = loops.find_missing_requirement()
    if reason is not None:
        print(f"gpu: {reason}", file=sys.stderr)
        return NO_GPU
    loops.import_package_without_init()
    from vllm_autoprune.ops.dpp_triton import works

    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    if works():
        print("\n".join(measure_loops(SIZES, 5 if options.quick else 21)))
    else:
        print("Triton does not work on this machine; the log says why.\n")
    if importlib.util.find_spec("pydantic") is None:
        print("Base policies and servers are not measured: pydantic is not installed.")
        return 0
    print("\n".join(measure_policies(SIZES[::2], 3 if options.quick else 9)))
    left_out = _why_not_served(options.quick, deadline - time.monotonic())
    if left_out:
        print(f"Served requests are not measured: {left_out}.")
        return 0
    return _serve(options.out)


def measure_loops(sizes: Sequence[Size], rounds: int, device: str = "cuda") -> Iterator[str]:
    """A table of the greedy loops: milliseconds of each, and whether they pick the same tokens."""
    yield "| greedy MAP, ms | published | torch | Triton | faster | picks as published |"
    yield "|---|---|---|---|---|---|"
    for size in sizes:
        result = loops.measure_size(size, rounds, device)
        seconds = cast("dict[str, list[float]]", result[loops.SECONDS])
        medians = (seconds[f"{name} loop"][0] for name in ("published", "torch", "triton"))
        times = " | ".join(f"{1000 * own:.2f}" for own in medians)
        same = result["picks as the published loop's"]
        yield f"| {size} | {times} | {result[loops.FASTER]:.1f} x | {same:.1%} |"
    yield ""


def measure_policies(sizes: Sequence[Size], rounds: int, device: str = "cuda") -> Iterator[str]:
    """A table of every base policy alone, in milliseconds an image; layers are not included."""
    from benchmarks.cost.selection.policies import TokenSource, select
    from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

    names = sorted(BASE_POLICIES)
    columns: list[dict[str, float]] = []
    for size in sizes:
        draw = TokenSource(size, device)
        works = {name: partial(select, name, draw, size.kept) for name in names}
        times = measure_alternately(works, rounds)
        columns.append({name: 1000 * median(own) for name, own in times.items()})
        log_progress(f"{size}: {len(names)} base policies")
    yield f"| base policy, ms | {' | '.join(map(str, sizes))} |"
    yield "|---" * (1 + len(sizes)) + "|"
    for name in names:
        yield f"| `{name}` | {' | '.join(f'{own[name]:.2f}' for own in columns)} |"
    yield ""


def _why_not_served(quick: bool, left: float) -> str:
    """Why no server is started; empty where one is."""
    if quick:
        return "--quick"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if left < SERVING_SECONDS:
        return f"{left:.0f} s are left, and two servers need {SERVING_SECONDS} s"
    return ""


def _serve(out: Path) -> int:
    """LLaVA-1.5-7B of full depth with random weights, stock and pruned."""
    from benchmarks.cost import efficiency

    parser = argparse.ArgumentParser()
    efficiency.add_arguments(parser)
    chosen = ["--model", "llava-1.5-7b", "--layers", "32", "--policies", "", "--scenes", "0"]
    return efficiency.run(parser.parse_args([*chosen, "--requests", "10", "--out", str(out)]))
