"""Candidate pools (C): which tokens outside the reference selection may be swapped in.

Knows nothing about how a swap is decided.

Builders narrow: the first sees every token outside the reference selection, each later one only
what the one before it left. Quality first and diversity second thus means "good tokens, and
among them those least like what is already kept".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.numerics import mask_of, ranked
from vllm_autoprune.tpdsl.tokens import VisualTokens


class PoolCall(AtomCall):
    """A pool builder and the size of its pool, relative to the budget."""

    pool_ratio: float = Field(1.0, ge=0.25, le=8.0, description="pool size as a multiple of K")


Pool = Annotated[PoolCall, OneOf("candidate_pool")]


def _first(order: Tensor, size: int, allowed: Tensor) -> Tensor:
    """Mask of the first ``size`` of an order, without what was never allowed."""
    return mask_of(order[:, :size], allowed.shape[1]) & allowed


@atom("candidate_pool", PoolCall)
def quality_pool_builder(
    call: PoolCall, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor, size: int
) -> Tensor:
    """The tokens of highest fused quality outside the reference selection."""
    return _first(ranked(g.masked_fill(~allowed, -torch.inf)), size, allowed)


@atom("candidate_pool", PoolCall, paper=False)
def diversity_pool_builder(
    call: PoolCall, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor, size: int
) -> Tensor:
    """Tokens farthest, in cosine distance, from the reference selection and from each other."""
    distance = 1 - tokens.cosine
    rows = reference[:, :, None].expand(-1, -1, tokens.count)
    nearest = distance.gather(1, rows).amin(dim=1)
    order = farthest_points(distance, size, nearest=nearest, taken=~allowed)
    return _first(order, size, allowed)


def build_pool(
    calls: Sequence[PoolCall], tokens: VisualTokens, g: Tensor, reference: Tensor
) -> Tensor:
    """Pool T_S as a mask ``(B, N)``, from quality ``(B, N)`` and reference ``(B, K)``."""
    allowed = ~mask_of(reference, tokens.count)
    outside = tokens.count - reference.shape[1]
    for call in calls:
        size = min(outside, max(1, math.ceil(call.pool_ratio * reference.shape[1])))
        pool = ATOMS.of(call).function(call, tokens, g, reference, allowed, size)
        assert isinstance(pool, Tensor)
        allowed = pool
    return allowed
