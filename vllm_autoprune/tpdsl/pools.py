"""Candidate pools (C): which tokens outside the reference selection may be swapped in.

Knows nothing about how a swap is decided.

A state lists builders, and they narrow: the first sees every token outside the reference
selection, each later one only what the one before it left. Quality first and diversity second thus
means "good tokens, and among them those least like what is already kept". To join pools instead, a
builder of the list may be ``multi_source_pool_builder``, which takes its sources' tokens in turn.

Every builder returns ``(B, N)`` int64: a token's place in the builder's own order, N for a token
that is not in its pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom, by_default
from vllm_autoprune.tpdsl.numerics import mask_of, places, ranked
from vllm_autoprune.tpdsl.partitions import grid_cells
from vllm_autoprune.tpdsl.tokens import VisualTokens


class PoolCall(AtomCall):
    """An atom that builds a pool."""


class SourceCall(PoolCall):
    """A pool builder that may be one of several sources."""


class SizedPool(SourceCall):
    """A pool builder and the size of its pool, relative to the budget."""

    pool_ratio: float = Field(1.0, ge=0.25, le=8.0, description="pool size as a multiple of K")


class CoveragePool(SourceCall):
    """Parameters of spatial_coverage_pool_builder."""

    cells: int = Field(6, ge=2, le=12, description="cells a side, within each tile")


def _size(ratio: float, reference: Tensor, count: int) -> int:
    """Tokens of a pool: no more than there are outside the reference selection ``(B, P)``."""
    picked = reference.shape[1]
    return min(count - picked, max(1, math.ceil(ratio * picked)))


@atom("candidate_pool", SizedPool)
def quality_pool_builder(
    call: SizedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor
) -> Tensor:
    """The tokens of highest fused quality outside the reference selection."""
    order = ranked(g.masked_fill(~allowed, -torch.inf))
    return places(order[:, : _size(call.pool_ratio, reference, tokens.count)], allowed)


@atom("candidate_pool", CoveragePool)
def spatial_coverage_pool_builder(
    call: CoveragePool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor
) -> Tensor:
    """The token of highest quality in each grid cell that holds no reference token."""
    cells, count = grid_cells(tokens.grid, call.cells, g.device)
    labels = cells.expand(tokens.batch, -1)
    covered = mask_of(labels.gather(1, reference), count).gather(1, labels)
    found = g.masked_fill(covered | ~allowed, -torch.inf)
    inside = cells[:, None] == torch.arange(count, device=g.device)
    value, best = found[:, :, None].masked_fill(~inside, -torch.inf).max(dim=1)
    # A cell without a candidate marks one token more than there are.
    best = best.where(value > -torch.inf, tokens.count)
    chosen = mask_of(best, tokens.count + 1)[:, : tokens.count]
    return places(ranked(found.masked_fill(~chosen, -torch.inf)), chosen)


@atom("candidate_pool", SizedPool, origin="listed")
def diversity_pool_builder(
    call: SizedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor
) -> Tensor:
    """Tokens farthest, in cosine distance, from the reference selection and from each other."""
    distance = 1 - tokens.cosine
    rows = reference[:, :, None].expand(-1, -1, tokens.count)
    nearest = distance.gather(1, rows).amin(dim=1)
    size = _size(call.pool_ratio, reference, tokens.count)
    return places(farthest_points(distance, size, nearest=nearest, taken=~allowed), allowed)


Source = Annotated[SourceCall, OneOf("candidate_pool", SourceCall)]


class JoinedPool(PoolCall):
    """Parameters of multi_source_pool_builder."""

    pool_ratio: float = Field(2.0, ge=0.25, le=8.0, description="pool size as a multiple of K")
    sources: Annotated[tuple[Source, ...], Field(min_length=1, max_length=8, strict=False)] = Field(
        default_factory=lambda: (
            by_default(SourceCall, "quality_pool_builder"),
            by_default(SourceCall, "spatial_coverage_pool_builder"),
        ),
        description="builders whose pools are joined; none: quality and spatial coverage",
    )


@atom("candidate_pool", JoinedPool)
def multi_source_pool_builder(
    call: JoinedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor
) -> Tensor:
    """The best tokens of several pools in turn, until the pool is full."""
    sources = [_places(source, tokens, g, reference, allowed) for source in call.sources]
    # A token's turn is its place in the source that names it first; sources go in their order.
    turns = [place * len(sources) + index for index, place in enumerate(sources)]
    turn = torch.stack(turns).amin(dim=0)
    size = _size(call.pool_ratio, reference, tokens.count)
    order = turn.argsort(dim=1, stable=True)[:, :size]
    return places(order, turn < tokens.count * len(sources))


Pool = Annotated[PoolCall, OneOf("candidate_pool", PoolCall)]


def build_pool(
    calls: Sequence[PoolCall], tokens: VisualTokens, g: Tensor, reference: Tensor
) -> Tensor:
    """Pool T_S as a mask ``(B, N)``, from quality ``(B, N)`` and reference ``(B, P)``."""
    allowed = ~mask_of(reference, tokens.count)
    for call in calls:
        allowed = _places(call, tokens, g, reference, allowed) < tokens.count
    return allowed


def _places(
    call: PoolCall, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Tensor
) -> Tensor:
    found = ATOMS.of(call).function(call, tokens, g, reference, allowed)
    assert isinstance(found, Tensor)
    return found
