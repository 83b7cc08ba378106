"""Loss of the stages that train the vision tower: classes of every patch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.minillava.training.towers import LossParts, classification_loss
from benchmarks.miniqwen.training.models import DenseHeads, tower_states
from benchmarks.miniqwen.training.pictures import FIELDS, Pictures, View

_WEIGHTS = {"digit": 2.0, "tens": 1.5, "units": 1.5, "word": 1.5}


def tower_loss(
    tower: Qwen3VLVisionModel, heads: DenseHeads, pictures: Pictures, view: View
) -> tuple[Tensor, LossParts]:
    """Sum of the cross entropies of all fields, and accuracies, whose names end in the divisor."""
    logits = heads(tower_states(tower, pictures.patches, view.seen).last)
    losses: list[Tensor] = []
    parts: LossParts = {}
    for name, target in zip(FIELDS, pictures.labels, strict=True):
        if bool((target >= 0).any()):
            loss, accuracy = classification_loss(logits[name], target)
            losses.append(loss * _WEIGHTS.get(name, 1.0))
            parts[f"{name}/{view.divisor}"] = accuracy
    total = torch.stack(losses).sum()
    return total, {"loss": float(total.detach())} | parts
