"""Reassembly atoms (R): the kept tokens become the K rows that the language model sees.

Knows nothing about why these tokens were kept. Only features change: never K, never indices.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.numerics import mask_of
from vllm_autoprune.tpdsl.outcome import Chosen
from vllm_autoprune.tpdsl.tokens import VisualTokens


class ResidualReassembly(AtomCall):
    """Parameters of the residual family; strength 0 is a pure gather."""

    strength: float = Field(
        0.0, ge=0.0, le=0.5, description="share of the discarded tokens' residual that is added"
    )


Reassembly = Annotated[AtomCall, OneOf("reassembly")]


def gather_rows(features: Tensor, indices: Tensor) -> Tensor:
    """Rows ``(B, K, D)`` of features ``(B, N, D)`` at indices ``(B, K)``."""
    return features.gather(1, indices[:, :, None].expand(-1, -1, features.shape[2]))


@atom("reassembly", ResidualReassembly)
def mean_residual(call: ResidualReassembly, tokens: VisualTokens, chosen: Chosen) -> Tensor:
    """Add to each kept token the mean residual of the discarded tokens nearest to it."""
    indices = chosen.indices
    anchors = gather_rows(chosen.reference.rows(tokens), indices)
    if call.strength == 0.0:
        return anchors
    kept = mask_of(indices, tokens.count)
    similarity = tokens.cosine.gather(2, indices[:, None, :].expand(-1, tokens.count, -1))
    owner = similarity.argmax(dim=2)
    member = torch.zeros_like(similarity).scatter_(2, owner[:, :, None], 1.0)
    member = member.masked_fill(kept[:, :, None], 0.0)
    size = member.sum(dim=1)[:, :, None]
    mean = (member.transpose(1, 2) @ tokens.features.float()) / size.clamp_min(1)
    residual = torch.where(size > 0, mean - anchors.float(), torch.zeros_like(mean))
    return (anchors.float() + call.strength * residual).to(anchors.dtype)


def run_reassembly(call: AtomCall, tokens: VisualTokens, chosen: Chosen) -> Tensor:
    """Rows ``(B, P, D)`` of the kept tokens, in the order of ``chosen.indices``."""
    features = ATOMS.of(call).function(call, tokens, chosen)
    assert isinstance(features, Tensor)
    return features
