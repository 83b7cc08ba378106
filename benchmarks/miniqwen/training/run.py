"""Training of mini-Qwen3-VL: five stages in two processes, and a checkpoint at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.minillava.training.optimiser import FlatMuon
from benchmarks.minillava.training.stages import (
    RANKS,
    RunSettings,
    Stage,
    join_ranks,
    log,
    run_stage,
)
from benchmarks.minillava.training.towers import LossParts
from benchmarks.miniqwen.pages import WORDS
from benchmarks.miniqwen.training.export import write_checkpoint
from benchmarks.miniqwen.training.language import (
    draw_budget,
    language_batch,
    language_loss,
    merger_loss,
)
from benchmarks.miniqwen.training.models import DenseHeads, build_model
from benchmarks.miniqwen.training.pictures import draw_pictures, draw_view
from benchmarks.miniqwen.training.tower import tower_loss
from benchmarks.miniqwen.vocabulary import language_tokenizer

# Shares of pictures seen at full size and limited to 1/2, 1/4, 1/8 and 1/16 of their tokens.
READING_VIEWS = (0.5, 0.3, 0.2, 0.0, 0.0)
TOWER_VIEWS = (0.3, 0.3, 0.25, 0.1, 0.05)
WHOLE_VIEWS = (1.0, 0.0, 0.0, 0.0, 0.0)
PHRASE_VIEWS = (0.8, 0.12, 0.08, 0.0, 0.0)
QUESTION_VIEWS = (0.45, 0.25, 0.2, 0.07, 0.03)
# Share of the steps of the last stage in which tokens are dropped, at full size.
DROPOUT = 0.3
# The phrase stage starts with few shapes, words and tokens, and has all of them at this step.
CURRICULUM_STEPS = 300
_FEWEST, _FEWEST_TOKENS = 4, 16

STAGES = (
    # The model continues with the next stage, so the rate does not fall at the end of this one.
    Stage("reading", 200, 12, 2e-3, 20, 0.0),
    Stage("tower", 2600, 12, 2e-3, 50, 0.5),
    Stage("naming", 150, 4, 2e-3, 15, 0.5),
    Stage("phrases", 600, 6, 1.5e-3, 20, 0.0),
    Stage("questions", 850, 6, 1.5e-3, 20, 0.4),
)


@dataclass(frozen=True)
class Run(RunSettings):
    """A run of all stages."""

    stages: tuple[Stage, ...] = STAGES


def train_rank(rank: int, run: Run) -> None:
    """Train all stages as one of the `RANKS` processes."""
    join_ranks(run, rank)
    words = language_tokenizer()
    model = build_model(words)
    started = time.monotonic()
    log(f"seed {run.seed}, {RANKS} ranks, torch {torch.__version__}")
    reading, towers, naming, phrases, questions = (
        stage.scaled(run.steps_scale) for stage in run.stages
    )
    _train_tower(run, model.model.visual, reading, towers)
    _train_mergers(run, model, words, naming)
    _train_language(run, model, words, phrases, questions)
    if rank == 0:
        write_checkpoint(run.out, model, words)
        log(f"wrote the checkpoint after {time.monotonic() - started:.0f}s in this run")
    dist.destroy_process_group()


def _train_tower(run: Run, tower: Qwen3VLVisionModel, reading: Stage, towers: Stage) -> None:
    """The first two stages: dense heads read pages, then scenes too, from the vision tower."""
    heads = DenseHeads()

    def reading_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        # Ranks draw the same view, because the one with fewer patches would wait.
        view = draw_view(seed // RANKS, READING_VIEWS)
        pages = max(1, reading.images * 2 // 3)
        pictures = draw_pictures(seed, reading.images - pages, pages, view, plain=True)
        return tower_loss(tower, heads, pictures, view)

    def tower_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        view = draw_view(seed // RANKS, TOWER_VIEWS)
        scenes = towers.images * 3 // 8
        pictures = draw_pictures(seed, scenes, towers.images - scenes, view)
        return tower_loss(tower, heads, pictures, view)

    tower.requires_grad_(True)
    for merger in (tower.merger, tower.deepstack_merger_list):
        merger.requires_grad_(False)
    for number, (stage, loss) in enumerate(((reading, reading_step), (towers, tower_step))):
        optimiser = FlatMuon({"tower": tower, "heads": heads}, stage.peak)
        run_stage(run, number, stage, optimiser, loss)


def _train_mergers(
    run: Run, model: Qwen3VLForConditionalGeneration, words: Tokenizer, naming: Stage
) -> None:
    """The third stage: the mergers' rows become those of the words that a picture shows."""
    model.requires_grad_(False)
    tower = model.model.visual
    for part in (tower.merger, tower.deepstack_merger_list, model.get_input_embeddings()):
        part.requires_grad_(True)
    # The modules that this stage does not train have to be of the same type.
    model.to(torch.bfloat16)

    def naming_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        view = draw_view(seed // RANKS, WHOLE_VIEWS)
        pictures = draw_pictures(seed, naming.images, naming.images, view)
        return merger_loss(model, words, pictures, view)

    run_stage(run, 2, naming, FlatMuon({"model": model}, naming.peak), naming_step)


def _train_language(
    run: Run,
    model: Qwen3VLForConditionalGeneration,
    words: Tokenizer,
    phrases: Stage,
    questions: Stage,
) -> None:
    """The last two stages: sentences about pictures, then answers to questions."""
    model.requires_grad_(True)
    tower = model.model.visual
    tower.requires_grad_(False)
    for merger in (tower.merger, tower.deepstack_merger_list):
        merger.requires_grad_(True)

    def phrase_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        view = draw_view(seed // RANKS, PHRASE_VIEWS)
        progress = min(1.0, step / (CURRICULUM_STEPS * run.steps_scale)) ** 2
        most = _FEWEST + round((len(WORDS) - _FEWEST) * progress)
        scenes = phrases.images // 2
        pictures = draw_pictures(seed, scenes, phrases.images - scenes, view, most=most)
        budget, whole = view.seen.tokens, view.seen == view.size
        if whole:
            budget = _FEWEST_TOKENS + round((budget - _FEWEST_TOKENS) * progress)
        batch = language_batch(seed, words, pictures, view, budget, 0, 40, informative=whole)
        return language_loss(model, batch, pictures, view)

    def question_step(seed: int, step: int) -> tuple[Tensor, LossParts]:
        view = draw_view(seed // RANKS, QUESTION_VIEWS)
        budget = view.seen.tokens
        if view.seen == view.size:
            budget = draw_budget(seed // RANKS, DROPOUT, budget)
        scenes = questions.images // 2
        pictures = draw_pictures(seed, scenes, questions.images - scenes, view)
        batch = language_batch(seed, words, pictures, view, budget, 12, 12)
        return language_loss(model, batch, pictures, view)

    for number, (stage, step) in enumerate(((phrases, phrase_step), (questions, question_step)), 3):
        optimiser = FlatMuon({"model": model}, stage.peak)
        run_stage(run, number, stage, optimiser, step)
