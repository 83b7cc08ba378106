"""Aggregation: weight of each token in the group of an anchor (a kept token).

Every function returns weights >= 0: of all tokens for each anchor ``(B, N, P)``, or ``(B, N, 1)``
if they are the same for every anchor, and of the anchors themselves ``(B, P)``.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.tokens import VisualTokens


class GatedCall(AtomCall):
    """Parameters of semantic_gated."""

    gate_quantile: float = Field(
        0.5, ge=0.0, le=0.95, description="share of tokens, the least relevant ones, with weight 0"
    )


Weights = tuple[Tensor, Tensor]


def mean(call: AtomCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor) -> Weights:
    """Equal weights."""
    return torch.ones_like(similarity[:, :, :1]), torch.ones_like(similarity[:, 0])


def similarity_weighted(
    call: AtomCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor
) -> Weights:
    """Cosine to the anchor; negative cosines count as 0."""
    return similarity.clamp_min(0), torch.ones_like(similarity[:, 0])


def semantic_gated(
    call: GatedCall, tokens: VisualTokens, similarity: Tensor, indices: Tensor
) -> Weights:
    """Normalised relevance to the instruction; 0 below the gate quantile."""
    instruction = tokens.require_instruction()
    r = min_max_normalise(instruction_relevance(instruction, sign=instruction.sign))
    gate = r.sort(dim=1).values[:, int(call.gate_quantile * (tokens.count - 1)), None]
    weight = r.masked_fill(r < gate, 0.0)
    return weight[:, :, None], weight.gather(1, indices)
