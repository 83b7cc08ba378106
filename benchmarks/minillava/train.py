"""The one training script: towers, then the language model, then the checkpoint.

Knows nothing about evaluation; scenes of the held-out split are never drawn here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import CLIPModel

from benchmarks.minillava.export import export
from benchmarks.minillava.language import (
    Projector,
    draw_budget,
    language_batch,
    language_loss,
    language_model,
)
from benchmarks.minillava.optimiser import FlatAdamW, schedule
from benchmarks.minillava.scenes import training_seed
from benchmarks.minillava.towers import (
    DenseHeads,
    clip_config,
    penultimate,
    tower_batch,
    tower_loss,
)
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer

RANKS = 2
IMAGES_PER_RANK = 16
STAGES = ("towers", "language")
STEPS = {"towers": 6500, "language": 3200}
PEAK = {"towers": 1e-3, "language": 1e-3}
WARMUP = 200
SNAPSHOT_EVERY = 500
REPORT_EVERY = 50

Loss = Callable[[int], tuple[Tensor, dict[str, float]]]


def say(text: str) -> None:
    """One line of the log, from the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def run_stage(
    stage: str, seed: int, steps: int, optimiser: FlatAdamW, loss: Loss, work: Path, resume: bool
) -> None:
    """Train one stage; with `resume` go on from its newest snapshot, if there is one."""
    file, first = work / f"{stage}.pt", 0
    if resume and file.exists():
        saved = torch.load(file, weights_only=True)
        first = int(saved["step"])
        optimiser.restore(saved["optimiser"])
    say(f"[{stage}] steps {first}..{steps}, peak learning rate {optimiser.peak:g}")
    began, sums, counts = time.monotonic(), dict[str, float](), dict[str, int]()
    for step in range(first, steps):
        drawn = training_seed(seed, STAGES.index(stage), step, dist.get_rank())
        value, parts = loss(drawn)
        value.backward()
        norm = optimiser.step(schedule(step, steps, min(WARMUP, max(1, steps // 10))))
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
        if (done % SNAPSHOT_EVERY == 0 or done == steps) and dist.get_rank() == 0:
            torch.save({"step": done, "optimiser": optimiser.state()}, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
    dist.barrier()


def work_of_rank(rank: int, arguments: argparse.Namespace) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    work: Path = arguments.work
    dist.init_process_group(
        "gloo", init_method=f"file://{work / 'meet'}", rank=rank, world_size=RANKS
    )
    torch.manual_seed(arguments.seed)
    eyes, words = clip_tokenizer(), language_tokenizer()
    clip, heads = CLIPModel(clip_config(eyes)), DenseHeads()
    projector, model = Projector(), language_model(words)
    began = time.monotonic()
    steps = {name: max(1, round(STEPS[name] * arguments.steps_scale)) for name in STAGES}
    here = f"{RANKS} ranks of {IMAGES_PER_RANK} images, torch {torch.__version__}"
    say(f"seed {arguments.seed}, {here}")

    def towers(seed: int) -> tuple[Tensor, dict[str, float]]:
        return tower_loss(clip, heads, tower_batch(seed, IMAGES_PER_RANK, eyes))

    optimiser = FlatAdamW((clip, heads), PEAK["towers"])
    common = (work, arguments.resume)
    run_stage("towers", arguments.seed, steps["towers"], optimiser, towers, *common)
    clip.requires_grad_(False)

    def language(seed: int) -> tuple[Tensor, dict[str, float]]:
        # One budget for both ranks, or the shorter sequence would wait for the longer one.
        budget = draw_budget(seed // RANKS)
        batch = language_batch(seed, IMAGES_PER_RANK, words, budget)
        with torch.no_grad():
            patches = penultimate(clip, batch.values)[:, 1:]
        return language_loss(model, projector, batch, patches)

    optimiser = FlatAdamW((projector, model), PEAK["language"])
    run_stage("language", arguments.seed, steps["language"], optimiser, language, *common)
    if rank == 0:
        export(arguments.out, clip, projector, model, eyes, words)
        say(f"wrote {arguments.out.name}/ after {time.monotonic() - began:.0f}s in this run")
    dist.destroy_process_group()


def main() -> None:
    """Parse, start both ranks, wait."""
    parser = argparse.ArgumentParser(description="Train the small LLaVA and its CLIP.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "minillava",
        help="folder of the snapshots (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the snapshots")
    parser.add_argument("--steps-scale", type=float, default=1.0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "meet").unlink(missing_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mp.spawn(work_of_rank, args=(arguments,), nprocs=RANKS)


if __name__ == "__main__":
    main()
