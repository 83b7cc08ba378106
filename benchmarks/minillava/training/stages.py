"""Stages of a training: their settings, the loop over steps, its log, snapshots and processes."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.minillava.training.optimiser import FlatMuon, schedule
from benchmarks.minillava.training.scenes import training_seed
from benchmarks.minillava.training.towers import LossParts

RANKS = 2
SNAPSHOT_SECONDS = 180.0
LOG_EVERY = 50
# A rank that was paused must find the other one still waiting for it.
TIMEOUT = datetime.timedelta(hours=1)

# The ranks inherit these. By default glibc returns every large tensor to the kernel and has its
# pages zeroed again for the next one, which costs a quarter of a step.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}

LossFunction = Callable[[int, int], tuple[Tensor, LossParts]]
"""(scene seed, step) → the loss, and its parts for the log."""


@dataclass(frozen=True)
class Stage:
    """Length, batch size and learning rate of one stage.

    `images` is per rank and step; the last two stages ask many questions about each. `fall` is the
    share of steps in which the rate falls. `checkpoint` is the folder written at the end, if any.
    """

    name: str
    steps: int
    images: int
    peak: float
    warmup: int
    fall: float
    checkpoint: str = ""

    def scaled(self, scale: float) -> Stage:
        """The stage with the number of steps that a run at this scale takes."""
        return replace(self, steps=max(1, round(self.steps * scale)))


@dataclass(frozen=True)
class RunSettings:
    """One training run: `out` receives the results, `work` the snapshots for `resume`."""

    out: Path
    work: Path
    seed: int = 7
    resume: bool = False
    steps_scale: float = 1.0


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that fill `RunSettings`."""
    parser.add_argument("--seed", type=int, default=7, help="seed of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is trained")
    parser.add_argument("--work", type=Path, required=True, help="folder for the snapshots")
    parser.add_argument("--resume", action="store_true", help="continue from the snapshots")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="0.01 is a smoke test")


def join_ranks(settings: RunSettings, rank: int) -> None:
    """Set up this process as one of the `RANKS`, with a single thread, and wait for the others."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    meeting = settings.work.resolve() / "meet"  # a file URL has no relative form
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    torch.manual_seed(settings.seed)


def start_ranks(train_rank: Callable[..., None], settings: RunSettings) -> None:
    """Start all ranks, each as `train_rank(rank, settings)`, and wait for them."""
    settings.work.mkdir(parents=True, exist_ok=True)
    (settings.work / "meet").unlink(missing_ok=True)
    os.environ.update(_ENVIRONMENT)
    mp.spawn(train_rank, args=(settings,), nprocs=RANKS)


def log(text: str) -> None:
    """Print a line from the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _save_snapshot(file: Path, step: int, optimiser: FlatMuon) -> None:
    """Replace a snapshot in one step, so that it is never seen half written."""
    torch.save({"step": step, "optimiser": optimiser.state()}, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


class _StageLog:
    """Means of loss parts since the last line, with the time that is left."""

    def __init__(self, stage: Stage, first: int) -> None:
        self._stage, self._first = stage, first
        self._started = time.monotonic()
        self._sums, self._counts = dict[str, float](), dict[str, int]()

    def add(self, done: int, parts: LossParts) -> None:
        """Count one step; print a line every `LOG_EVERY` steps and at the end."""
        for name, part in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + part
            self._counts[name] = self._counts.get(name, 0) + 1
        steps = self._stage.steps
        if done % LOG_EVERY and done != steps:
            return
        elapsed = time.monotonic() - self._started
        left = elapsed / (done - self._first) * (steps - done)
        means = " ".join(f"{n}={self._sums[n] / self._counts[n]:.3f}" for n in self._sums)
        log(f"[{self._stage.name}] {done}/{steps} {means} {elapsed:.0f}s ETA {left:.0f}s")
        self._sums, self._counts = {}, {}


def run_stage(
    settings: RunSettings, number: int, stage: Stage, optimiser: FlatMuon, loss: LossFunction
) -> None:
    """Train one stage; with `resume`, continue from its newest snapshot if there is one.

    A batch depends on seed, stage, step and rank only, so a resumed run draws the same batches.
    """
    file, first = settings.work / f"{stage.name}.pt", 0
    if settings.resume and file.exists():
        snapshot = torch.load(file, weights_only=True)
        first = int(snapshot["step"])
        optimiser.restore(snapshot["optimiser"])
        log(f"[{stage.name}] resumed at step {first}")
    log(f"[{stage.name}] steps {first}..{stage.steps}, peak learning rate {optimiser.peak:g}")
    lines, saved_at = _StageLog(stage, first), time.monotonic()
    warmup = min(stage.warmup, max(1, stage.steps // 10))
    for step in range(first, stage.steps):
        value, parts = loss(training_seed(settings.seed, number, step, dist.get_rank()), step)
        value.backward()
        norm = optimiser.step(schedule(step, stage.steps, warmup, stage.fall))
        done = step + 1
        lines.add(done, parts | {"norm": norm})
        due = done == stage.steps or time.monotonic() - saved_at > SNAPSHOT_SECONDS
        if due and dist.get_rank() == 0:
            _save_snapshot(file, done, optimiser)
            saved_at = time.monotonic()
    dist.barrier()
