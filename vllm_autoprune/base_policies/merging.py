"""What methods that merge tokens share: tile by tile before the projector, then back to images.

Knows nothing about which tokens are kept or what is merged into them.

R = B * T tiles of n tokens, Dv the tower's width, D that of the projected features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.base_policy import Native, Reference
from vllm_autoprune.tpdsl.reassembly import gather_rows
from vllm_autoprune.tpdsl.tiles import TileGroup, join_groups, tile_groups
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True, slots=True)
class TileRows:
    """What a method makes of R tiles, before the projector.

    picks ``(R, P)`` within the tile; merged ``(R, m, Dv)`` are the rows of the last m picks, the
    others stay as they are; extra ``(R, E, Dv)`` are rows that stand for no single token.
    """

    picks: Tensor
    merged: Tensor
    extra: Tensor


def merge_by_tile(
    tokens: VisualTokens, budget: int, run: Callable[[TileGroup], TileRows]
) -> Reference:
    """Run a method on every tile at its share of the budget; what is merged is projected after.

    ``run`` gets tiles of equal share and returns P + E = share rows for each.
    """
    groups = tile_groups(tokens, budget)
    picks, rows, extra = [], [], []
    for group in groups:
        made = run(group)
        low = torch.cat([made.merged, made.extra], dim=1).to(tokens.require_tower().patches.dtype)
        high = tokens.require_tower().projected(low).to(tokens.features.dtype)
        merged, own = high.split([made.merged.shape[1], made.extra.shape[1]], dim=1)
        plain = made.picks[:, : made.picks.shape[1] - merged.shape[1]]
        untouched = gather_rows(group.of(tokens.features, tokens), plain)
        picks.append(group.within_image(made.picks, tokens))
        rows.append(torch.cat([untouched, merged], dim=1))
        extra.append(own)
    joined = join_groups(extra, groups, tokens)
    return Reference(
        picks=join_groups(picks, groups, tokens),
        merged=join_groups(rows, groups, tokens),
        extra=joined if joined.shape[1] else None,
    )


def native_by_tile(tokens: VisualTokens, run: Callable[[int], tuple[Tensor, Tensor]]) -> Native:
    """What a method's published code makes of each tile, tile after tile.

    ``run`` takes the number of a tile, of B * T, and returns indices ``(n_t,)`` within it, -1 for
    a row that stands for no single token, and rows ``(n_t, Dv)``.
    """
    indices, features = [], []
    for image in range(tokens.batch):
        found = []
        for tile in range(tokens.grid.tiles):
            own, rows = run(image * tokens.grid.tiles + tile)
            within = torch.where(own < 0, own, own + tile * tokens.grid.per_tile)
            found.append((within, rows))
        indices.append(torch.cat([own for own, _ in found]))
        features.append(torch.cat([rows for _, rows in found]))
    return Native(tuple(indices), tuple(features))


def products(left: Tensor, right: Tensor) -> Tensor:
    """``(R, a, n)`` times ``(R, n, b)``, one of the R at a time: same bits alone and in a batch."""
    return torch.stack([a @ b for a, b in zip(left, right, strict=True)])
