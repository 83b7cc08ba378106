"""Training on conversations: one stage, from the projector and language model of a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPModel, LlamaForCausalLM

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.split import CHECKPOINT
from benchmarks.minillava.training.conversations.batch import conversation_batch
from benchmarks.minillava.training.export import LANGUAGE_MODEL, PROJECTOR, language_tensors
from benchmarks.minillava.training.language import draw_budget, language_loss
from benchmarks.minillava.training.models import (
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
from benchmarks.minillava.training.towers import LossParts
from benchmarks.minillava.vocabulary import clip_tokenizer, language_tokenizer

LANGUAGE = "language.safetensors"
"""The file that is written."""

STAGE = Stage("conversations", 500, 8, 2e-3, 50, 0.45)
# After the numbers of the stages from scratch, so that no scene occurs twice.
_STAGE_NUMBER = 5
# Share of the steps in which tokens are dropped; only these can recall any.
DROPOUT = 0.65


@dataclass(frozen=True)
class Run(RunSettings):
    """One training that continues from a checkpoint, with or without recalled tokens."""

    checkpoint: Path = CHECKPOINT
    recall: bool = True
    stage: Stage = STAGE


def load_models(checkpoint: Path, canvas: Canvas) -> tuple[CLIPModel, Projector, LlamaForCausalLM]:
    """CLIP, frozen and in bfloat16, projector and language model with a checkpoint's weights."""
    clip = build_clip(clip_tokenizer(), canvas)
    clip.load_state_dict(load_file(checkpoint / "clip" / "model.safetensors"), strict=False)
    clip.to(torch.bfloat16).requires_grad_(False)
    projector, model = Projector(), build_language_model(language_tokenizer())
    tensors = load_file(checkpoint / "llava" / "model.safetensors")
    for module, prefix in ((projector, PROJECTOR), (model, LANGUAGE_MODEL)):
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        module.load_state_dict(own)
    return clip, projector, model


def train_rank(rank: int, run: Run) -> None:
    """Train the stage as one of the `RANKS` processes."""
    join_ranks(run, rank)
    canvas, words = Canvas(), language_tokenizer()
    clip, projector, model = load_models(run.checkpoint, canvas)
    started = time.monotonic()
    stage = run.stage.scaled(run.steps_scale)
    log(f"seed {run.seed}, {RANKS} ranks, torch {torch.__version__}")

    def step_loss(seed: int, step: int) -> tuple[Tensor, LossParts]:
        # Ranks draw the same budget, because the one with shorter sequences would wait.
        budget = draw_budget(seed // RANKS, DROPOUT, canvas)
        batch = conversation_batch(seed, stage.images, words, canvas, budget, run.recall)
        with torch.no_grad():
            patches = penultimate_states(clip, batch.values.bfloat16())[:, 1:]
        return language_loss(model, projector, batch, patches)

    optimiser = FlatMuon({"projector": projector, "model": model}, stage.peak)
    run_stage(run, _STAGE_NUMBER, stage, optimiser, step_loss)
    if rank == 0:
        run.out.mkdir(parents=True, exist_ok=True)
        save_file(language_tensors(projector, model), run.out / LANGUAGE, metadata={"format": "pt"})
        log(f"wrote {LANGUAGE} after {time.monotonic() - started:.0f}s in this run")
    dist.destroy_process_group()
