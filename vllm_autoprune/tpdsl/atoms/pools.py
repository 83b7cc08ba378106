"""Candidate pools and partitions (C): tokens that may be exchanged in, and parts of the image.

The builders that a state lists are applied in sequence. The first one sees every token outside the
reference selection, and each later one the pool of its predecessor. Quality followed by diversity
means "of the best tokens, those least similar to the reference selection". To unite pools instead,
use ``multi_source_pool_builder``, which takes tokens from its sources in turn.

Every builder returns ``(B, N)`` int64: the position of each token in the builder's own order, or N
for a token outside its pool. The largest possible size of a pool is known in advance, so builders
that compare candidates with each other need no work of size N x N. A partition, which a state names
as ``constraints.partition``, labels every token: ``(B, N)`` int64 in 0..N-1.
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
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.rowwise import (
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    positions_in_order,
    rank_descending,
)
from vllm_autoprune.ops.similarity import cosines, cosines_between, spherical_kmeans
from vllm_autoprune.tpdsl.registry import AtomCall, OneOf, atom, default_call, run
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

MAX_POOL_RATIO = 16.0
"""Largest pool size, as a multiple of K, that is a number."""


class PartitionCall(AtomCall):
    """An atom that labels tokens by part of the image."""


class _GridPartition(PartitionCall):
    cells: int = Field(4, ge=2, le=12, description="cells per side of each tile")


class _ClusterPartition(PartitionCall):
    """Parameters of feature_cluster_partition."""

    clusters: int = Field(16, ge=2, le=64, description="number of clusters")
    iters: int = Field(5, ge=1, le=20, description="iterations of k-means")


Partition = Annotated[PartitionCall, OneOf("candidate_pool", PartitionCall)]


def _grid_cells(tokens: VisualTokens, cells: int) -> tuple[Tensor, int]:
    """Cell ``(R, N)`` of each token, and the number of cells; every tile has its own cells.

    R is as of :meth:`.VisualTokens.at_tokens`.
    """
    grid = tokens.grid
    device = tokens.features.device
    rows = min(cells, grid.height)
    columns = min(cells, grid.width)
    y = torch.arange(grid.height, device=device) * rows // grid.height
    x = torch.arange(grid.width, device=device) * columns // grid.width
    of_tile = tokens.at_tokens((y[:, None] * columns + x).reshape(1, -1))
    offset = torch.arange(grid.tiles, device=device)[:, None] * (rows * columns)
    return (offset + of_tile[:, None]).flatten(1), grid.tiles * rows * columns


@atom("candidate_pool", _ClusterPartition)
def _feature_cluster_partition(call: _ClusterPartition, tokens: VisualTokens) -> Tensor:
    """Label tokens by spherical k-means on their features, seeded with farthest points."""
    return spherical_kmeans(tokens.cosine, call.clusters, call.iters)[0]


@atom("candidate_pool", _GridPartition)
def _spatial_grid_partition(call: _GridPartition, tokens: VisualTokens) -> Tensor:
    """Label tokens by their cell in a regular grid over each tile."""
    cells, _ = _grid_cells(tokens, call.cells)
    return cells.expand(tokens.batch, -1)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that a builder may take: a mask ``(B, N)`` and an upper bound of their number."""

    mask: Tensor
    max_count: int


class PoolCall(AtomCall):
    """An atom that builds a pool."""

    def max_size(self, grid: Grid, picked: int) -> int:
        """Largest size of the pool, for a reference selection of ``picked`` tokens."""
        return grid.tokens - picked

    @property
    def reads_quality(self) -> bool:
        """Whether token quality decides which tokens are in the pool."""
        return True


class SourceCall(PoolCall):
    """A pool builder that may be a source of ``multi_source_pool_builder``."""


class _SizedPool(SourceCall):
    """A pool builder with a pool size relative to K."""

    pool_ratio: float | None = Field(
        1.0,
        ge=0.25,
        le=MAX_POOL_RATIO,
        description="pool size as a multiple of K; null: every token outside the reference "
        "selection",
    )

    def max_size(self, grid: Grid, picked: int) -> int:
        """The pool size, capped at the number of tokens outside the reference selection."""
        return _size(self.pool_ratio, grid, picked)

    @property
    def reads_quality(self) -> bool:
        """Whether the pool has a size: without one, every token is in it."""
        return self.pool_ratio is not None

    def describe(self, doc: str) -> str:
        """Whether the pool has a size."""
        if self.pool_ratio is not None:
            return doc
        return "Every token outside the reference selection."


class _DiversityPool(_SizedPool):
    """Parameters of diversity_pool_builder."""

    @property
    def reads_quality(self) -> bool:
        """False: cosines alone."""
        return False


class _CoveragePool(SourceCall):
    """Parameters of spatial_coverage_pool_builder."""

    cells: int = Field(6, ge=2, le=12, description="cells a side, within each tile")


def _size(ratio: float | None, grid: Grid, picked: int) -> int:
    """Size of a pool: ``ratio`` x K, capped at the number of tokens outside the selection."""
    outside = grid.tokens - picked
    return outside if ratio is None else min(outside, max(1, math.ceil(ratio * picked)))


@atom("candidate_pool", _SizedPool, cost=0.1)
def _quality_pool_builder(
    call: _SizedPool,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    allowed: _Candidates,
) -> Tensor:
    """Tokens of highest quality outside the reference selection."""
    order = rank_descending(g.masked_fill(~allowed.mask, -torch.inf))
    return positions_in_order(
        order[:, : call.max_size(tokens.grid, reference.shape[1])], allowed.mask
    )


@atom("candidate_pool", _CoveragePool, cost=0.2)
def _spatial_coverage_pool_builder(
    call: _CoveragePool,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    allowed: _Candidates,
) -> Tensor:
    """The token of highest quality in each grid cell without a reference token."""
    cells, count = _grid_cells(tokens, call.cells)
    labels = cells.expand(tokens.batch, -1)
    covered = mask_from_indices(labels.gather(1, reference), count).gather(1, labels)
    scores = g.masked_fill(covered | ~allowed.mask, -torch.inf)
    inside = cells[:, :, None] == torch.arange(count, device=g.device)
    value, best = scores[:, :, None].masked_fill(~inside, -torch.inf).max(dim=1)
    # A cell without a candidate marks position N, which is cut off below.
    best = best.where(value > -torch.inf, tokens.count)
    chosen = mask_from_indices(best, tokens.count + 1)[:, : tokens.count]
    return positions_in_order(
        rank_descending(scores.masked_fill(~chosen, -torch.inf)), chosen
    )


@atom("candidate_pool", _DiversityPool, origin="listed", cost=2.7)
def _diversity_pool_builder(
    call: _DiversityPool,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    allowed: _Candidates,
) -> Tensor:
    """Tokens farthest, in cosine distance, from the reference selection and from each other."""
    # The candidates, padded with other tokens to the upper bound; padding is masked as taken.
    candidates = indices_from_mask(allowed.mask, allowed.max_count)
    taken = ~allowed.mask.gather(1, candidates)
    among, to_reference = _cosines_of(tokens, candidates, reference)
    size = min(allowed.max_count, call.max_size(tokens.grid, reference.shape[1]))
    nearest = (1 - to_reference).amin(dim=2)
    order = farthest_points(1 - among, size, Chosen(nearest, taken))
    return positions_in_order(candidates.gather(1, order), allowed.mask)


def _cosines_of(
    tokens: VisualTokens, some: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines ``(B, R, R)`` among the tokens ``some``, and ``(B, R, C)`` from them to ``others``.

    ``some`` ``(B, R)`` and ``others`` ``(B, C)`` are indices. If tokens are compared only within
    their tile, the cosine between tokens of two tiles counts as 0.
    """
    grid = tokens.grid
    if grid.tiles > 1 and tokens.tile_scope == "per_tile":
        # The base selection or the signals have already cached the per-tile cosines.
        rows = gather_rows(tokens.by_image(tokens.tile_cosine), some)
        return _within_tiles(rows, some, some, grid), _within_tiles(
            rows, some, others, grid
        )
    if grid.tiles == 1 or tokens.known_cosine is not None:
        rows = gather_rows(tokens.cosine, some)
        count = some.shape[1]
        return (
            rows.gather(2, some[:, None].expand(-1, count, -1)),
            rows.gather(2, others[:, None].expand(-1, count, -1)),
        )
    # Cosines over all tiles are not cached, and computing all N x N would dominate the selection.
    features = gather_rows(tokens.features, some)
    among = cosines(features, features.norm(dim=-1, keepdim=True))
    return among, cosines_between(features, gather_rows(tokens.features, others))


def _within_tiles(rows: Tensor, some: Tensor, others: Tensor, grid: Grid) -> Tensor:
    """Cosines ``(B, R, C)`` from per-tile rows ``(B, R, n)``; 0 for tokens of different tiles."""
    place = (others % grid.per_tile)[:, None].expand(-1, some.shape[1], -1)
    apart = (some // grid.per_tile)[:, :, None] != (others // grid.per_tile)[:, None]
    return rows.gather(2, place).masked_fill_(apart, 0.0)


Source = Annotated[SourceCall, OneOf("candidate_pool", SourceCall)]


class JoinedPool(PoolCall):
    """Parameters of multi_source_pool_builder."""

    pool_ratio: float = Field(
        2.0, ge=0.25, le=MAX_POOL_RATIO, description="pool size as a multiple of K"
    )
    sources: Annotated[
        tuple[Source, ...], Field(min_length=1, max_length=8, strict=False)
    ] = Field(
        default_factory=lambda: (
            default_call(SourceCall, "quality_pool_builder"),
            default_call(SourceCall, "spatial_coverage_pool_builder"),
        ),
        description="builders whose pools are united, none of them multi_source_pool_builder",
    )

    def max_size(self, grid: Grid, picked: int) -> int:
        """The pool size, capped at the number of tokens outside the reference selection."""
        return _size(self.pool_ratio, grid, picked)

    @property
    def reads_quality(self) -> bool:
        """Whether a source does."""
        return any(source.reads_quality for source in self.sources)

    def describe(self, doc: str) -> str:
        """Which pools are united."""
        names = ", ".join(source.atom for source in self.sources)
        return doc.replace("several pools", f"the pools of {names}")


@atom("candidate_pool", JoinedPool, cost=0.1)
def _multi_source_pool_builder(
    call: JoinedPool,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    allowed: _Candidates,
) -> Tensor:
    """Union of several pools, filled by taking the best token of each source in turn."""
    sources = [
        run(Tensor, source, tokens, g, reference, allowed) for source in call.sources
    ]
    # Turn of a token: its smallest position in any source; ties go to the earlier source.
    turns = [
        positions * len(sources) + index for index, positions in enumerate(sources)
    ]
    turn = torch.stack(turns).amin(dim=0)
    order = turn.argsort(dim=1, stable=True)[
        :, : call.max_size(tokens.grid, reference.shape[1])
    ]
    return positions_in_order(order, turn < tokens.count * len(sources))


Pool = Annotated[PoolCall, OneOf("candidate_pool", PoolCall)]


def build_pool(
    calls: Sequence[PoolCall], tokens: VisualTokens, g: Tensor, reference: Tensor
) -> Tensor:
    """Mask ``(B, N)`` of the candidate pool T_S.

    It has the tokens outside the reference selection ``(B, P)``, narrowed by each of ``calls`` in
    turn. ``g`` ``(B, N)`` is token quality.
    """
    picked = reference.shape[1]
    allowed = _Candidates(
        ~mask_from_indices(reference, tokens.count), tokens.count - picked
    )
    for call in calls:
        mask = run(Tensor, call, tokens, g, reference, allowed) < tokens.count
        allowed = _Candidates(
            mask, min(allowed.max_count, call.max_size(tokens.grid, picked))
        )
    return allowed.mask
