"""Partitions (C): label every token with the part of the image that it belongs to.

These are atoms of the group candidate_pool; a state names one as ``constraints.partition``. Every
function takes its call and B images and returns labels ``(B, N)`` int64 in 0..N-1.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

SETTLED = 1e-12
"""Squared length below which a centroid has no direction, because its members cancel out."""


class PartitionCall(AtomCall):
    """An atom that labels tokens."""


class GridPartition(PartitionCall):
    """Parameters of spatial_grid_partition."""

    cells: int = Field(4, ge=2, le=12, description="cells per side of each tile")


class ClusterPartition(PartitionCall):
    """Parameters of feature_cluster_partition."""

    clusters: int = Field(16, ge=2, le=64, description="number of clusters")
    iters: int = Field(5, ge=1, le=20, description="iterations of k-means")


Partition = Annotated[PartitionCall, OneOf("candidate_pool", PartitionCall)]


def grid_cells(grid: Grid, cells: int, device: torch.device) -> tuple[Tensor, int]:
    """Cell ``(N,)`` of each token, and the number of cells; every tile has its own cells."""
    rows, columns = min(cells, grid.height), min(cells, grid.width)
    y = torch.arange(grid.height, device=device) * rows // grid.height
    x = torch.arange(grid.width, device=device) * columns // grid.width
    of_tile = (y[:, None] * columns + x).flatten()
    first = torch.arange(grid.tiles, device=device)[:, None] * (rows * columns)
    return (first + of_tile).flatten(), grid.tiles * rows * columns


def spherical_kmeans(cosine: Tensor, clusters: int, iters: int) -> tuple[Tensor, Tensor]:
    """Spherical k-means on cosines ``(B, N, N)``: labels, and cosines ``(B, N, C)`` to centroids.

    Features are not needed: a centroid is the sum of its members' directions, so its cosines are
    sums of theirs. Seeds are the token farthest from the image's mean and then farthest points; a
    cluster that loses all its members keeps its centroid.
    """
    batch, tokens, _ = cosine.shape
    count = min(clusters, tokens)
    distance = 1 - cosine
    first = cosine.sum(dim=2).argmin(dim=1, keepdim=True)
    nearest = distance.gather(1, first[:, :, None].expand(-1, -1, tokens))[:, 0]
    taken = torch.zeros(batch, tokens, dtype=torch.bool, device=cosine.device)
    rest = farthest_points(
        distance, count - 1, nearest=nearest, taken=taken.scatter(1, first, True)
    )
    seeds = torch.cat([first, rest], dim=1)
    near = cosine.gather(2, seeds[:, None, :].expand(-1, tokens, -1))
    for _ in range(iters):
        near = _to_centroids(cosine, near)
    return near.argmax(dim=2), near


def _to_centroids(cosine: Tensor, near: Tensor) -> Tensor:
    """Cosines ``(B, N, C)`` to the centroids of the clusters assigned by the cosines ``near``."""
    member = torch.zeros_like(near).scatter_(2, near.argmax(dim=2, keepdim=True), 1.0)
    along = matmul_each(cosine, member)
    squared = (along * member).sum(dim=1, keepdim=True)
    known = squared > SETTLED
    return torch.where(known, along * squared.clamp_min(SETTLED).rsqrt(), near)


@atom("candidate_pool", ClusterPartition)
def feature_cluster_partition(call: ClusterPartition, tokens: VisualTokens) -> Tensor:
    """Label tokens by spherical k-means on their features, seeded with farthest points."""
    return spherical_kmeans(tokens.cosine, call.clusters, call.iters)[0]


@atom("candidate_pool", GridPartition)
def spatial_grid_partition(call: GridPartition, tokens: VisualTokens) -> Tensor:
    """Label tokens by their cell in a regular grid over each tile."""
    cells, _ = grid_cells(tokens.grid, call.cells, tokens.features.device)
    return cells.expand(tokens.batch, -1)


def run_partition(call: PartitionCall, tokens: VisualTokens) -> Tensor:
    """Run the partition of a call: labels ``(B, N)``."""
    labels = ATOMS.of(call).function(call, tokens)
    assert isinstance(labels, Tensor)
    return labels
