"""Aggregation: how much a discarded token weighs with an anchor, and the anchor with itself.

Knows nothing about shares or rows. Every function returns weights >= 0: of every token with every
anchor ``(B, N, P)``, or ``(B, N, 1)`` where the anchor makes no difference, and of the anchors
themselves ``(B, P)``.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import AtomCall
from vllm_autoprune.tpdsl.numerics import normalise
from vllm_autoprune.tpdsl.scoring import relevance
from vllm_autoprune.tpdsl.tokens import VisualTokens


class GatedCall(AtomCall):
    """Parameters of the semantic gate."""

    gate_quantile: float = Field(
        0.5, ge=0.0, le=0.95, description="share of the tokens, the least relevant, that weigh 0"
    )


Weights = tuple[Tensor, Tensor]


def mean(call: AtomCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor) -> Weights:
    """All alike."""
    return torch.ones_like(similarity[:, :, :1]), torch.ones_like(similarity[:, 0])


def similarity_weighted(
    call: AtomCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor
) -> Weights:
    """By cosine to the anchor, opposite tokens not at all."""
    return similarity.clamp_min(0), torch.ones_like(similarity[:, 0])


def semantic_gated(
    call: GatedCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor
) -> Weights:
    """By relevance to the instruction, normalised over the image; below the gate not at all."""
    instruction = tokens.require_instruction()
    r = normalise(relevance(instruction, sign=instruction.sign))
    gate = r.sort(dim=1).values[:, int(call.gate_quantile * (tokens.count - 1)), None]
    weight = r.masked_fill(r < gate, 0.0)
    return weight[:, :, None], weight.gather(1, indices)
