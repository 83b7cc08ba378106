"""Token merging per tile before the projector, shared by the base policies that merge.

R = B * T tiles of n tokens, Dv the tower's width, D that of the projected features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.base_policy import PublishedSelection, ReferenceSelection
from vllm_autoprune.tpdsl.tokens import TileGroup, VisualTokens, join_groups, tile_groups


@dataclass(frozen=True, slots=True)
class TileRows:
    """Rows of R tiles, before the projector.

    picks ``(R, P)`` within the tile; merged ``(R, m, Dv)`` replace the rows of the last m picks;
    extra ``(R, E, Dv)`` are rows that no single token stands for.
    """

    picks: Tensor
    merged: Tensor
    extra: Tensor


def merge_by_tile(
    tokens: VisualTokens, budget: int, run: Callable[[TileGroup], TileRows]
) -> ReferenceSelection:
    """Run a method on every tile with its share of the budget, then project the merged rows.

    ``run`` gets tiles of equal share and returns P + E = share rows for each tile.
    """
    groups = tile_groups(tokens, budget)
    picks, rows, extra = [], [], []
    for group in groups:
        result = run(group)
        low = torch.cat([result.merged, result.extra], dim=1).to(
            tokens.require_tower().patches.dtype
        )
        high = tokens.require_tower().projected(low).to(tokens.output.dtype)
        merged, added = high.split([result.merged.shape[1], result.extra.shape[1]], dim=1)
        plain = result.picks[:, : result.picks.shape[1] - merged.shape[1]]
        untouched = gather_rows(group.of(tokens.output, tokens), plain)
        picks.append(group.within_image(result.picks, tokens))
        rows.append(torch.cat([untouched, merged], dim=1))
        extra.append(added)
    joined = join_groups(extra, groups, tokens)
    return ReferenceSelection(
        picks=join_groups(picks, groups, tokens),
        merged=join_groups(rows, groups, tokens),
        extra=joined if joined.shape[1] else None,
    )


def native_by_tile(
    tokens: VisualTokens, run: Callable[[int], tuple[Tensor, Tensor]]
) -> PublishedSelection:
    """Run a method's published code on each tile and join the results per image.

    ``run`` takes the number of a tile in 0..B * T - 1 and returns indices ``(n_t,)`` within it, -1
    for a row that no single token stands for, and rows ``(n_t, Dv)``.
    """
    indices, features = [], []
    for image in range(tokens.batch):
        parts = []
        for tile in range(tokens.grid.tiles):
            within, rows = run(image * tokens.grid.tiles + tile)
            parts.append(
                (torch.where(within < 0, within, within + tile * tokens.grid.per_tile), rows)
            )
        indices.append(torch.cat([tokens_of_tile for tokens_of_tile, _ in parts]))
        features.append(torch.cat([rows for _, rows in parts]))
    return PublishedSelection(tuple(indices), tuple(features))
