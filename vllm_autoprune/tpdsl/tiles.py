"""Conversion of picks within tiles to picks within the image, and LLaVA-NeXT's token order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.tokens import VisualTokens


def split_over_tiles(budget: int, tiles: int) -> tuple[int, ...]:
    """Shares of K per tile: ``K // T`` each, and one more for the first ``K % T`` tiles."""
    share, rest = divmod(budget, tiles)
    return tuple(share + (tile < rest) for tile in range(tiles))


def join_tiles(
    picks: Tensor, tokens: VisualTokens, shares: Sequence[int], first: int = 0
) -> Tensor:
    """Picks ``(B * T, max share)`` within tiles as picks ``(B, K)`` within images.

    For nested selections, whose first k picks do not depend on how many follow: a tile with a
    smaller share drops its last pick. Picks of the tiles are interleaved by rank, so that earlier
    picks still mean higher confidence. The larger shares are those of the tiles from ``first`` on.
    """
    tiles, size = tokens.grid.tiles, tokens.grid.per_tile
    if tiles == 1:
        return picks
    offset = torch.arange(tiles, device=picks.device)[:, None] * size
    by_tile = picks.reshape(tokens.batch, tiles, -1) + offset
    by_rank = by_tile.roll(-first, dims=1).transpose(1, 2)
    flat = by_rank.reshape(tokens.batch, -1)
    return flat[:, : sum(shares)]


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Adjacent tiles with an equal share of the budget."""

    first: int
    tiles: int
    share: int

    def of(self, values: Tensor, tokens: VisualTokens) -> Tensor:
        """Values ``(B, N, ...)`` of the group's tokens, as ``(B * tiles, n, ...)``."""
        shape = (tokens.batch, tokens.grid.tiles, tokens.grid.per_tile, *values.shape[2:])
        return values.reshape(shape).narrow(1, self.first, self.tiles).flatten(0, 1)

    def within_image(self, picks: Tensor, tokens: VisualTokens) -> Tensor:
        """Picks ``(B * tiles, p)`` within tiles as picks within the image, same shape."""
        tile = torch.arange(self.first, self.first + self.tiles, device=picks.device)
        return picks + (tile * tokens.grid.per_tile).repeat(tokens.batch)[:, None]


def tile_groups(tokens: VisualTokens, budget: int) -> tuple[TileGroup, ...]:
    """Group tiles by their share of the budget, larger share first, omitting a share of 0.

    For selections that are not nested: the picks at k are not the first k picks at k + 1, so each
    share (there are at most two) has to be computed separately.
    """
    shares = split_over_tiles(budget, tokens.grid.tiles)
    groups, first = [], 0
    for share in sorted(set(shares), reverse=True):
        count = shares.count(share)
        if share:
            groups.append(TileGroup(first, count, share))
        first += count
    return tuple(groups)


def join_groups(
    parts: Sequence[Tensor], groups: Sequence[TileGroup], tokens: VisualTokens
) -> Tensor:
    """Join parts ``(B * tiles, p, ...)``, one per group, as ``(B, sum, ...)`` interleaved by rank.

    The first group has as many rows per tile as the second, or one more.
    """
    spread = [
        part.reshape(tokens.batch, group.tiles, *part.shape[1:]).transpose(1, 2)
        for part, group in zip(parts, groups, strict=True)
    ]
    if len(spread) == 1:
        return spread[0].flatten(1, 2)
    common = spread[1].shape[1]
    both = torch.cat([spread[0][:, :common], spread[1]], dim=2).flatten(1, 2)
    return torch.cat([both, spread[0][:, common:].flatten(1, 2)], dim=1)
