"""Training from scratch: five stages and two checkpoints, before and after token dropout."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
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
from benchmarks.minillava.training.optimiser import FlatMuon
from benchmarks.minillava.training.stages import (
    RANKS,
    RunSettings,
    Stage,
    join_ranks,
    log,
    run_stage,
)
from benchmarks.minillava.training.towers import (
    LossParts,
    reading_loss,
    tower_batch,
    tower_loss,
)
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer

SIZES = {"small": Canvas(4), "large": Canvas(8)}

# Scenes of the phrase stage start with two shapes in few tokens and are complete at this step.
CURRICULUM_STEPS = 700
CURRICULUM_TOKENS = 12
# Share of the steps of the last stage in which tokens are dropped.
DROPOUT = 0.5

STAGES = (
    Stage("reading", 300, 16, 2e-3, 50, 0.4),
    Stage("towers", 1500, 16, 2e-3, 100, 0.4),
    # The model continues with questions, so its rate does not fall at the end of this stage.
    Stage("phrases", 1200, 8, 4e-3, 100, 0.0),
    Stage("questions", 2400, 8, 4e-3, 100, 0.4, "whole"),
    Stage("gaps", 250, 8, 1e-3, 30, 0.9, "gaps"),
)


@dataclass(frozen=True)
class Run(RunSettings):
    """One training from scratch."""

    size: str = "small"
    stages: tuple[Stage, ...] = STAGES

    def scaled_stages(self) -> list[Stage]:
        """The stages with the number of steps that this run takes."""
        return [stage.scaled(self.steps_scale) for stage in self.stages]


def train_rank(rank: int, run: Run) -> None:
    """Train all stages as one of the `RANKS` processes."""
    join_ranks(run, rank)
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
