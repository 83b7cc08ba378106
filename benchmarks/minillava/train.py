"""The one training script: a reading primer, towers, phrases, questions, gaps, two checkpoints.

Knows nothing about evaluation; scenes of the held-out splits are never drawn here.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.minillava.export import export
from benchmarks.minillava.language import (
    PHRASES,
    QUESTIONS,
    LanguageBatch,
    Projector,
    draw_budget,
    language_batch,
    language_loss,
    language_model,
)
from benchmarks.minillava.layout import MOST_THINGS, Canvas, training_seed
from benchmarks.minillava.optimiser import FlatMuon, schedule
from benchmarks.minillava.towers import (
    DenseHeads,
    clip_model,
    penultimate,
    reading_loss,
    tower_batch,
    tower_loss,
)
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer

RANKS = 2
STAGES = ("reading", "towers", "phrases", "questions", "gaps")
STEPS = {"reading": 300, "towers": 1500, "phrases": 1200, "questions": 2400, "gaps": 250}
# Images a rank and step; the last stages ask many questions about each.
IMAGES = {"reading": 16, "towers": 16, "phrases": 8, "questions": 8, "gaps": 8}
PEAK = {"reading": 2e-3, "towers": 2e-3, "phrases": 4e-3, "questions": 4e-3, "gaps": 1e-3}
WARMUP = {"reading": 50, "towers": 100, "phrases": 100, "questions": 100, "gaps": 30}
# The model that reads phrases goes on to questions, so its rate need not fall in between.
FALL = {"reading": 0.4, "towers": 0.4, "phrases": 0.0, "questions": 0.4, "gaps": 0.9}
# Scenes of the phrase stage start with two shapes in few tokens, and are whole from this step on.
GROWN = 700
FEWEST = 12
# Share of the steps of the last stage that see an image with tokens left out.
GAPS = 0.5
SIZES = {"small": Canvas(4), "large": Canvas(8)}
# The checkpoint of a model that only ever saw whole images, and of the same after the last stage.
WHOLE, WITH_GAPS = "whole", "gaps"
SNAPSHOT_SECONDS = 180.0
REPORT_EVERY = 50
# Nobody is waiting: a process that was paused must find the other one still there.
PATIENCE = datetime.timedelta(hours=1)

# The ranks inherit these. By default glibc gives every large tensor back to the kernel and has its
# pages zeroed anew for the next one, which costs a quarter of a step.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}

Loss = Callable[[int, int], tuple[Tensor, dict[str, float]]]
"""(scene seed, step) → the loss and what the log says of it."""


def say(text: str) -> None:
    """One line of the log, from the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _save(file: Path, step: int, optimiser: FlatMuon) -> None:
    """Write a snapshot that is never seen half written."""
    torch.save({"step": step, "optimiser": optimiser.state()}, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def run_stage(
    stage: str, seed: int, steps: int, optimiser: FlatMuon, loss: Loss, work: Path, resume: bool
) -> None:
    """Train one stage; with `resume` go on from its newest snapshot, if there is one.

    Batches depend on seed, stage, step and rank alone, so a resumed run draws the same ones.
    """
    file, first = work / f"{stage}.pt", 0
    if resume and file.exists():
        saved = torch.load(file, weights_only=True)
        first = int(saved["step"])
        optimiser.restore(saved["optimiser"])
        say(f"[{stage}] resumed at step {first}")
    say(f"[{stage}] steps {first}..{steps}, peak learning rate {optimiser.peak:g}")
    began, sums, counts = time.monotonic(), dict[str, float](), dict[str, int]()
    saved_at = began
    for step in range(first, steps):
        drawn = training_seed(seed, STAGES.index(stage), step, dist.get_rank())
        value, parts = loss(drawn, step)
        value.backward()
        warmup = min(WARMUP[stage], max(1, steps // 10))
        norm = optimiser.step(schedule(step, steps, warmup, FALL[stage]))
        for name, part in (parts | {"norm": norm}).items():
            sums[name] = sums.get(name, 0.0) + part
            counts[name] = counts.get(name, 0) + 1
        done = step + 1
        if done % REPORT_EVERY == 0 or done == steps:
            spent = time.monotonic() - began
            left = spent / (done - first) * (steps - done)
            means = " ".join(f"{name}={sums[name] / counts[name]:.3f}" for name in sums)
            say(f"[{stage}] {done}/{steps} {means} {spent:.0f}s ETA {left:.0f}s")
            sums, counts = {}, {}
        if dist.get_rank() == 0 and (
            done == steps or time.monotonic() - saved_at > SNAPSHOT_SECONDS
        ):
            _save(file, done, optimiser)
            saved_at = time.monotonic()
    dist.barrier()


def work_of_rank(rank: int, arguments: argparse.Namespace) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    work: Path = arguments.work.resolve()  # a file URL has no relative form
    dist.init_process_group(
        "gloo", init_method=f"file://{work / 'meet'}", rank=rank, world_size=RANKS, timeout=PATIENCE
    )
    torch.manual_seed(arguments.seed)
    canvas = SIZES[arguments.size]
    eyes, words = clip_tokenizer(), language_tokenizer()
    clip, heads = clip_model(eyes, canvas), DenseHeads(canvas)
    projector, model = Projector(), language_model(words)
    began = time.monotonic()
    steps = {name: max(1, round(STEPS[name] * arguments.steps_scale)) for name in STAGES}
    say(f"seed {arguments.seed}, size {arguments.size}, {RANKS} ranks, torch {torch.__version__}")
    common = (work, arguments.resume)

    def reading(seed: int, step: int) -> tuple[Tensor, dict[str, float]]:
        return reading_loss(clip, heads, seed, IMAGES["reading"], canvas)

    def towers(seed: int, step: int) -> tuple[Tensor, dict[str, float]]:
        return tower_loss(clip, heads, tower_batch(seed, IMAGES["towers"], eyes, canvas))

    for stage, loss in (("reading", reading), ("towers", towers)):
        optimiser = FlatMuon({"clip": clip, "heads": heads}, PEAK[stage])
        run_stage(stage, arguments.seed, steps[stage], optimiser, loss, *common)
    clip.requires_grad_(False)

    def answer(batch: LanguageBatch) -> tuple[Tensor, dict[str, float]]:
        with torch.no_grad():
            patches = penultimate(clip, batch.values)[:, 1:]
        return language_loss(model, projector, batch, patches)

    def phrases(seed: int, step: int) -> tuple[Tensor, dict[str, float]]:
        # Slowly at first: in a crowd of tokens, words of one name do not find each other.
        grown = min(1.0, step / (GROWN * arguments.steps_scale)) ** 2
        area = canvas.cells**2 // 16
        most = 2 + round((MOST_THINGS * area - 2) * grown)
        few = FEWEST * area
        budget = few + round((canvas.patches - few) * grown)
        return answer(language_batch(seed, IMAGES["phrases"], words, canvas, budget, PHRASES, most))

    def questions(seed: int, step: int) -> tuple[Tensor, dict[str, float]]:
        return answer(
            language_batch(seed, IMAGES["questions"], words, canvas, canvas.patches, QUESTIONS)
        )

    def gaps(seed: int, step: int) -> tuple[Tensor, dict[str, float]]:
        # One budget for both ranks, or the shorter sequence would wait for the longer one.
        budget = draw_budget(seed // RANKS, GAPS, canvas)
        return answer(language_batch(seed, IMAGES["gaps"], words, canvas, budget, QUESTIONS))

    for stage, loss, name in (
        ("phrases", phrases, ""),
        ("questions", questions, WHOLE),
        ("gaps", gaps, WITH_GAPS),
    ):
        optimiser = FlatMuon({"projector": projector, "model": model}, PEAK[stage])
        run_stage(stage, arguments.seed, steps[stage], optimiser, loss, *common)
        if rank == 0 and name:
            export(arguments.out / name, canvas, clip, projector, model, eyes, words)
            say(f"wrote {name}/ after {time.monotonic() - began:.0f}s in this run")
    dist.destroy_process_group()


def main() -> None:
    """Parse, start both ranks, wait."""
    parser = argparse.ArgumentParser(description="Train the mini-LLaVA and its CLIP.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--out", type=Path, required=True, help="folder of both checkpoints")
    parser.add_argument("--work", type=Path, required=True, help="folder of the snapshots")
    parser.add_argument("--resume", action="store_true", help="go on from the snapshots")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="0.01 is a smoke test")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "meet").unlink(missing_ok=True)
    os.environ.update(_ENVIRONMENT)
    mp.spawn(work_of_rank, args=(arguments,), nprocs=RANKS)


if __name__ == "__main__":
    main()
