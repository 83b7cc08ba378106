"""Candidate pools (C): which tokens outside the reference selection may be swapped in.

Knows nothing about how a swap is decided.

A state lists builders, and they narrow: the first sees every token outside the reference
selection, each later one only what the one before it left. Quality first and diversity second thus
means "good tokens, and among them those least like what is already kept". To join pools instead, a
builder of the list may be ``multi_source_pool_builder``, which takes its sources' tokens in turn.

Every builder returns ``(B, N)`` int64: a token's place in the builder's own order, N for a token
that is not in its pool. How many tokens a pool holds at most is known without a look at it, so a
builder that compares its candidates with each other can leave the rest of the image alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.ops.products import cosines, cosines_between
from vllm_autoprune.ops.rows import rows_at
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom, by_default
from vllm_autoprune.tpdsl.numerics import mask_of, places, ranked, raster
from vllm_autoprune.tpdsl.partitions import grid_cells
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that a builder may take: a mask ``(B, N)``, and a bound on how many those are."""

    mask: Tensor
    most: int


class PoolCall(AtomCall):
    """An atom that builds a pool."""

    def most(self, grid: Grid, picked: int) -> int:
        """Tokens that its pool may hold, for a reference selection of ``picked``."""
        return grid.tokens - picked


class SourceCall(PoolCall):
    """A pool builder that may be one of several sources."""


class SizedPool(SourceCall):
    """A pool builder and the size of its pool, relative to the budget."""

    pool_ratio: float = Field(1.0, ge=0.25, le=8.0, description="pool size as a multiple of K")

    def most(self, grid: Grid, picked: int) -> int:
        """Its size, or all that is outside the reference selection."""
        return _size(self.pool_ratio, grid, picked)


class CoveragePool(SourceCall):
    """Parameters of spatial_coverage_pool_builder."""

    cells: int = Field(6, ge=2, le=12, description="cells a side, within each tile")


def _size(ratio: float, grid: Grid, picked: int) -> int:
    """Tokens of a pool: no more than there are outside the reference selection."""
    return min(grid.tokens - picked, max(1, math.ceil(ratio * picked)))


@atom("candidate_pool", SizedPool)
def quality_pool_builder(
    call: SizedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Candidates
) -> Tensor:
    """The tokens of highest fused quality outside the reference selection."""
    order = ranked(g.masked_fill(~allowed.mask, -torch.inf))
    return places(order[:, : call.most(tokens.grid, reference.shape[1])], allowed.mask)


@atom("candidate_pool", CoveragePool)
def spatial_coverage_pool_builder(
    call: CoveragePool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Candidates
) -> Tensor:
    """The token of highest quality in each grid cell that holds no reference token."""
    cells, count = grid_cells(tokens.grid, call.cells, g.device)
    labels = cells.expand(tokens.batch, -1)
    covered = mask_of(labels.gather(1, reference), count).gather(1, labels)
    found = g.masked_fill(covered | ~allowed.mask, -torch.inf)
    inside = cells[:, None] == torch.arange(count, device=g.device)
    value, best = found[:, :, None].masked_fill(~inside, -torch.inf).max(dim=1)
    # A cell without a candidate marks one token more than there are.
    best = best.where(value > -torch.inf, tokens.count)
    chosen = mask_of(best, tokens.count + 1)[:, : tokens.count]
    return places(ranked(found.masked_fill(~chosen, -torch.inf)), chosen)


@atom("candidate_pool", SizedPool, origin="listed")
def diversity_pool_builder(
    call: SizedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Candidates
) -> Tensor:
    """Tokens farthest, in cosine distance, from the reference selection and from each other."""
    # The candidates, and after them others up to the bound, which may not be picked.
    found = raster(allowed.mask, allowed.most)
    taken = ~allowed.mask.gather(1, found)
    among, to_reference = _cosines_of(tokens, found, reference)
    size = min(allowed.most, call.most(tokens.grid, reference.shape[1]))
    nearest = (1 - to_reference).amin(dim=2)
    order = farthest_points(1 - among, size, nearest=nearest, taken=taken)
    return places(found.gather(1, order), allowed.mask)


def _cosines_of(tokens: VisualTokens, some: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines ``(B, R, R)`` among tokens at ``(B, R)``, ``(B, R, C)`` to those at ``(B, C)``.

    Compared within their tile only, tokens of two tiles count as unlike: their cosine is 0.
    """
    grid = tokens.grid
    if grid.tiles > 1 and tokens.tile_scope == "per_tile":
        # All rows there are of a token: its tile's. The selection has made them already.
        rows = rows_at(tokens.by_image(tokens.tile_cosine), some)
        return _within_tiles(rows, some, some, grid), _within_tiles(rows, some, others, grid)
    if grid.tiles == 1 or tokens.known_cosine is not None:
        rows = rows_at(tokens.cosine, some)
        count = some.shape[1]
        return (
            rows.gather(2, some[:, None].expand(-1, count, -1)),
            rows.gather(2, others[:, None].expand(-1, count, -1)),
        )
    # Over all tiles nothing is known yet, and all of it would be several selections' work.
    features = rows_at(tokens.features, some)
    among = cosines(features, features.norm(dim=-1, keepdim=True))
    return among, cosines_between(features, rows_at(tokens.features, others))


def _within_tiles(rows: Tensor, some: Tensor, others: Tensor, grid: Grid) -> Tensor:
    """``(B, R, C)`` of rows ``(B, R, n)`` that each belong to the tile of their own token."""
    place = (others % grid.per_tile)[:, None].expand(-1, some.shape[1], -1)
    apart = (some // grid.per_tile)[:, :, None] != (others // grid.per_tile)[:, None]
    return rows.gather(2, place).masked_fill_(apart, 0.0)


Source = Annotated[SourceCall, OneOf("candidate_pool", SourceCall)]


class JoinedPool(PoolCall):
    """Parameters of multi_source_pool_builder."""

    pool_ratio: float = Field(2.0, ge=0.25, le=8.0, description="pool size as a multiple of K")
    sources: Annotated[tuple[Source, ...], Field(min_length=1, max_length=8, strict=False)] = Field(
        default_factory=lambda: (
            by_default(SourceCall, "quality_pool_builder"),
            by_default(SourceCall, "spatial_coverage_pool_builder"),
        ),
        description="builders whose pools are joined",
    )

    def most(self, grid: Grid, picked: int) -> int:
        """Its size, or all that is outside the reference selection."""
        return _size(self.pool_ratio, grid, picked)


@atom("candidate_pool", JoinedPool)
def multi_source_pool_builder(
    call: JoinedPool, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Candidates
) -> Tensor:
    """The best tokens of several pools in turn, until the pool is full."""
    sources = [_places(source, tokens, g, reference, allowed) for source in call.sources]
    # A token's turn is its place in the source that names it first; sources go in their order.
    turns = [place * len(sources) + index for index, place in enumerate(sources)]
    turn = torch.stack(turns).amin(dim=0)
    order = turn.argsort(dim=1, stable=True)[:, : call.most(tokens.grid, reference.shape[1])]
    return places(order, turn < tokens.count * len(sources))


Pool = Annotated[PoolCall, OneOf("candidate_pool", PoolCall)]


def build_pool(
    calls: Sequence[PoolCall], tokens: VisualTokens, g: Tensor, reference: Tensor
) -> Tensor:
    """Pool T_S as a mask ``(B, N)``, from quality ``(B, N)`` and reference ``(B, P)``."""
    picked = reference.shape[1]
    allowed = Candidates(~mask_of(reference, tokens.count), tokens.count - picked)
    for call in calls:
        mask = _places(call, tokens, g, reference, allowed) < tokens.count
        allowed = Candidates(mask, min(allowed.most, call.most(tokens.grid, picked)))
    return allowed.mask


def _places(
    call: PoolCall, tokens: VisualTokens, g: Tensor, reference: Tensor, allowed: Candidates
) -> Tensor:
    found = ATOMS.of(call).function(call, tokens, g, reference, allowed)
    assert isinstance(found, Tensor)
    return found
