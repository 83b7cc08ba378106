"""`python -m benchmarks.cost kernels`: selections by Triton's kernels and by torch's loops.

Both take turns on random images whose features are clustered (:class:`BatchSize`), in bfloat16 and
of a 7B model's width. Beside them stands the modelled time of `python -m benchmarks.cost launches`,
which is to be checked on a GPU. On a CPU both are torch's loops, which tries the command only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import BenchmarkError
from benchmarks.common.report import (
    MIB,
    environment,
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from benchmarks.cost.launches import SelectionCost, Size
from benchmarks.cost.selection import BatchSize
from vllm_autoprune import VisualTokens
from vllm_autoprune.ops import dpp, farthest
from vllm_autoprune.ops.farthest_torch import walk_torch
from vllm_autoprune.ops.greedy import greedy_map_torch
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate, Spread, Verdict
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_POLICIES = ("divprune", "cen_divprune", "cdpruner", "cen_cdpruner")
_LIMITS = {(4096, 512): 0.003, (16384, 2048): 0.025}
"""Promised seconds of a selection on an H100, by N and K."""
_COLUMNS = (
    "policy",
    "N → K",
    "kernel, ms",
    "modelled, ms",
    "torch's loop, ms",
    "loop / kernel",
    "same picks, %",
    "peak memory, MiB",
    "promise",
)


@contextmanager
def _torch_loops() -> Iterator[None]:
    """Let selections on a GPU run torch's loops in place of Triton's kernels."""
    with (
        patch.object(farthest, "fastest_walk", lambda *_: walk_torch),
        patch.object(dpp, "fastest_implementation", lambda *_: greedy_map_torch),
    ):
        yield


@dataclass(frozen=True)
class _Measurement:
    """Seconds of every round of a policy at one size."""

    policy: str
    size: BatchSize
    kernel: tuple[float, ...]
    loop: tuple[float, ...]
    alike: float
    """Share of the loop's picks that the kernel picks too."""
    peak: int | None
    """Bytes of a selection with kernels beyond its inputs; None on a CPU."""

    @property
    def modelled(self) -> float:
        """Seconds of the selection with kernels by the model of an H100."""
        size = Size(self.size.per_tile, self.size.kept, self.size.tiles)
        return SelectionCost.of(self.policy, size, batch=self.size.batch).seconds

    @property
    def ratio(self) -> Estimate:
        """How many times the kernel's time the loop takes."""
        return Estimate.ratio_of_medians(self.loop, self.kernel)

    @property
    def promise(self) -> tuple[float, Verdict] | None:
        """The promised maximum in seconds, and whether it holds."""
        limit = _LIMITS.get((self.size.tokens, self.size.kept))
        if limit is None or self.size.batch > 1:
            return None
        share = Estimate.ratio_of_medians(self.kernel, [limit] * len(self.kernel))
        return limit, share.at_most(1)

    def format_row(self) -> list[str]:
        """The row of the table."""
        promise = self.promise
        return [
            f"`{self.policy}`",
            str(self.size),
            format_spread(Spread.of(self.kernel)),
            f"{1000 * self.modelled:.1f}",
            format_spread(Spread.of(self.loop)),
            format_estimate(self.ratio, digits=2),
            f"{100 * self.alike:.1f}",
            "no GPU" if self.peak is None else f"{self.peak / MIB:,.0f}",
            "" if promise is None else f"{1000 * promise[0]:g} ms: {promise[1]}",
        ]

    def record(self) -> dict[str, object]:
        """The row as JSON."""
        return {
            **dataclasses.asdict(self),
            "modelled": self.modelled,
            "ratio": dataclasses.asdict(self.ratio),
            "promise": self.promise,
        }


def _measure(
    policy: str, tokens: VisualTokens, size: BatchSize, rounds: int
) -> _Measurement:
    """Time a policy with kernels and with loops in turn, after two rounds of each."""
    base = BASE_POLICIES[policy]
    cuda = tokens.features.is_cuda

    def select() -> tuple[Tensor, float]:
        """Picks and seconds; a copy of the tokens has no cached results of earlier rounds."""
        copy = replace(tokens)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        picks = base.select(base.default_params, copy, size.kept).picks
        if cuda:
            torch.cuda.synchronize()
        return picks, time.perf_counter() - begin

    kernel = []
    loop = []
    peak: int | None = None
    with torch.inference_mode():
        for turn in range(-2, rounds):
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            picks, seconds = select()
            if cuda:
                peak = torch.cuda.max_memory_allocated() - before
            with _torch_loops():
                loop_picks, loop_seconds = select()
            if turn >= 0:
                kernel.append(seconds)
                loop.append(loop_seconds)
    equal = (picks[:, :, None] == loop_picks[:, None, :]).any(dim=2)
    alike = float(equal.float().mean())
    return _Measurement(policy, size, tuple(kernel), tuple(loop), alike, peak)


def _parse_size(text: str, batch: int) -> BatchSize:
    """Parse ``N:K`` or, of T tiles of n tokens, ``Txn:K``; raises :class:`BenchmarkError`."""
    shape, _, kept = text.partition(":")
    tiles, times, tokens = shape.rpartition("x")
    numbers = (tokens, tiles if times else "1", kept)
    if not all(number.isdecimal() for number in numbers):
        raise BenchmarkError.of(
            f"--sizes {text}", "no size", "write 4096:512 or 5x576:320"
        )
    per_tile, count, budget = map(int, numbers)
    return BatchSize(per_tile, count, batch, budget)


OPTIONS = {
    "--sizes": {
        "default": "5x576:320,4096:512,16384:2048",
        "help": "N:K, or tiles x tokens:K, of each size",
    },
    "--batch": {"type": int, "default": 1, "help": "images that are selected together"},
    "--rounds": {"type": int, "default": 15, "help": "timed rounds of each selection"},
    "--out": {
        "type": Path,
        "default": Path("out/kernels"),
        "help": "folder of kernels.json",
    },
}


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; returns 0 whatever the promises are."""
    cuda = torch.cuda.is_available()
    sizes = [_parse_size(text, options.batch) for text in options.sizes.split(",")]
    name = torch.cuda.get_device_name() if cuda else "CPU, with torch's loops for both"
    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[_Measurement] = []
    for size in sizes:
        tokens = size.draw_tokens("cuda" if cuda else "cpu")
        for policy in _POLICIES:
            measured.append(_measure(policy, tokens, size, options.rounds))
            log_progress(f"{policy}, {size}")
            record = {
                "device": name,
                "environment": environment("triton"),
                "rows": [measurement.record() for measurement in measured],
            }
            (options.out / "kernels.json").write_text(json.dumps(record, indent=1))
    rows = [measurement.format_row() for measurement in measured]
    print(f"# Selections on {name}\n")
    print("bfloat16, D = 4096; medians (quartiles), ratios with 95 % intervals.\n")
    print(Table("", _COLUMNS, rows, align="ll").markdown())
    print(f"\n{format_environment()}")
    return 0
