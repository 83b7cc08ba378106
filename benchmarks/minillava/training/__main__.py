"""``python -m benchmarks.minillava.training``: train mini-LLaVA and its CLIP from scratch.

Five stages in two processes; two checkpoints, before and after the stage with dropped tokens.
"""

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

from benchmarks.minillava.layout import MAX_SHAPES, Canvas
from benchmarks.minillava.training.export import write_checkpoint
from benchmarks.minillava.training.language import (
    PHRASES,
    QUESTIONS,
    LanguageBatch,
    draw_budget,
    language_batch,
    language_loss,
)
from benchmarks.minillava.training.models import (
    DenseHeads,
    Projector,
    build_clip,
    build_language_model,
    penultimate_states,
)
from benchmarks.minillava.training.optimiser import FlatMuon, schedule
from benchmarks.minillava.training.scenes import training_seed
from benchmarks.minillava.training.towers import (
    LossParts,
    reading_loss,
    tower_batch,
    tower_loss,
)
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer

RANKS = 2
SIZES = {"small": Canvas(4), "large": Canvas(8)}
SNAPSHOT_SECONDS = 180.0
LOG_EVERY = 50
# A rank that was paused must find the other one still waiting for it.
TIMEOUT = datetime.timedelta(hours=1)

# Scenes of the phrase stage start with two shapes in few tokens and are complete at this step.
CURRICULUM_STEPS = 700
CURRICULUM_TOKENS = 12
# Share of the steps of the last stage in which tokens are dropped.
DROPOUT = 0.5

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


STAGES = (
    Stage("reading", 300, 16, 2e-3, 50, 0.4),
    Stage("towers", 1500, 16, 2e-3, 100, 0.4),
    # The model continues with questions, so its rate does not fall at the end of this stage.
    Stage("phrases", 1200, 8, 4e-3, 100, 0.0),
    Stage("questions", 2400, 8, 4e-3, 100, 0.4, "whole"),
    Stage("gaps", 250, 8, 1e-3, 30, 0.9, "gaps"),
)


@dataclass(frozen=True)
class Run:
    """One training run: `out` receives the checkpoints, `work` the snapshots for `resume`."""

    out: Path
    work: Path
    seed: int = 7
    size: str = "small"
    resume: bool = False
    steps_scale: float = 1.0
    stages: tuple[Stage, ...] = STAGES

    def scaled_stages(self) -> list[Stage]:
        """The stages with the number of steps that this run takes."""
        return [
            replace(stage, steps=max(1, round(stage.steps * self.steps_scale)))
            for stage in self.stages
        ]


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


def run_stage(run: Run, number: int, stage: Stage, optimiser: FlatMuon, loss: LossFunction) -> None:
    """Train one stage; with `resume`, continue from its newest snapshot if there is one.

    A batch depends on seed, stage, step and rank only, so a resumed run draws the same batches.
    """
    file, first = run.work / f"{stage.name}.pt", 0
    if run.resume and file.exists():
        snapshot = torch.load(file, weights_only=True)
        first = int(snapshot["step"])
        optimiser.restore(snapshot["optimiser"])
        log(f"[{stage.name}] resumed at step {first}")
    log(f"[{stage.name}] steps {first}..{stage.steps}, peak learning rate {optimiser.peak:g}")
    lines, saved_at = _StageLog(stage, first), time.monotonic()
    warmup = min(stage.warmup, max(1, stage.steps // 10))
    for step in range(first, stage.steps):
        value, parts = loss(training_seed(run.seed, number, step, dist.get_rank()), step)
        value.backward()
        norm = optimiser.step(schedule(step, stage.steps, warmup, stage.fall))
        done = step + 1
        lines.add(done, parts | {"norm": norm})
        due = done == stage.steps or time.monotonic() - saved_at > SNAPSHOT_SECONDS
        if due and dist.get_rank() == 0:
            _save_snapshot(file, done, optimiser)
            saved_at = time.monotonic()
    dist.barrier()


def train_rank(rank: int, run: Run) -> None:
    """Train all stages as one of the `RANKS` processes."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    meeting = run.work.resolve() / "meet"  # a file URL has no relative form
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    torch.manual_seed(run.seed)
    canvas = SIZES[run.size]
    clip_words, words = clip_tokenizer(), language_tokenizer()
    clip, heads = build_clip(clip_words, canvas), DenseHeads(canvas)
    projector, model = Projector(), build_language_model(words)
    started = time.monotonic()
    log(f"seed {run.seed}, size {run.size}, {RANKS} ranks, torch {torch.__version__}")
    reading, towers, phrases, questions, gaps = run.scaled_stages()

    def reading_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        return reading_loss(clip, heads, seed, reading.images, canvas)

    def tower_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        return tower_loss(clip, heads, tower_batch(seed, towers.images, clip_words, canvas))

    for number, (stage, loss) in enumerate(((reading, reading_step), (towers, tower_step))):
        optimiser = FlatMuon({"clip": clip, "heads": heads}, stage.peak)
        run_stage(run, number, stage, optimiser, loss)
    clip.requires_grad_(False)

    def answer_loss(batch: LanguageBatch) -> tuple[Tensor, LossParts]:
        with torch.no_grad():
            patches = penultimate_states(clip, batch.values)[:, 1:]
        return language_loss(model, projector, batch, patches)

    def phrase_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        # A low rate at first: among many tokens, attention joins the words of a name only slowly.
        progress = min(1.0, step / (CURRICULUM_STEPS * run.steps_scale)) ** 2
        area = canvas.cells**2 // 16
        max_shapes = 2 + round((MAX_SHAPES * area - 2) * progress)
        fewest = CURRICULUM_TOKENS * area
        budget = fewest + round((canvas.patches - fewest) * progress)
        return answer_loss(
            language_batch(seed, phrases.images, words, canvas, budget, PHRASES, max_shapes)
        )

    def question_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        return answer_loss(
            language_batch(seed, questions.images, words, canvas, canvas.patches, QUESTIONS)
        )

    def gap_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        # Ranks draw the same budget, because the one with shorter sequences would wait.
        budget = draw_budget(seed // RANKS, DROPOUT, canvas)
        return answer_loss(language_batch(seed, gaps.images, words, canvas, budget, QUESTIONS))

    language_steps = ((phrases, phrase_step), (questions, question_step), (gaps, gap_step))
    for number, (stage, loss) in enumerate(language_steps, 2):
        optimiser = FlatMuon({"projector": projector, "model": model}, stage.peak)
        run_stage(run, number, stage, optimiser, loss)
        if rank == 0 and stage.checkpoint:
            folder = run.out / stage.checkpoint
            write_checkpoint(folder, canvas, clip, projector, model, clip_words, words)
            log(f"wrote {stage.checkpoint}/ after {time.monotonic() - started:.0f}s in this run")
    dist.destroy_process_group()


def main() -> None:
    """Parse the arguments, start all ranks and wait for them."""
    parser = argparse.ArgumentParser(description="Train mini-LLaVA and its CLIP from scratch.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--out", type=Path, required=True, help="folder for both checkpoints")
    parser.add_argument("--work", type=Path, required=True, help="folder for the snapshots")
    parser.add_argument("--resume", action="store_true", help="continue from the snapshots")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="0.01 is a smoke test")
    arguments = parser.parse_args()
    run = Run(**vars(arguments))
    run.work.mkdir(parents=True, exist_ok=True)
    (run.work / "meet").unlink(missing_ok=True)
    os.environ.update(_ENVIRONMENT)
    mp.spawn(train_rank, args=(run,), nprocs=RANKS)


if __name__ == "__main__":
    main()
