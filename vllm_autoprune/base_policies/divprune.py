"""DivPrune: maximise the smallest pairwise distance of the kept tokens (max-min diversity).

Source: Alvar et al., "DivPrune" (CVPR 2025), and its published code.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import distance_to_kept, farthest_points
from vllm_autoprune.ops.rowwise import argmax_within
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens, join_tiles, split_over_tiles


class _DivPruneParams(PolicyParams):
    """Parameters of DivPrune."""

    tile_scope: TileScope = Field(
        "per_tile", description="select within each tile or across all tiles of an image"
    )


def _select(params: _DivPruneParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Max-min cosine distance, starting from the given tokens.

    Distances are in the dtype of the features, as in the published code: in half precision ties are
    common, and the lower index wins.
    """
    across = params.tile_scope == "global"
    cosine = tokens.cosine if across else tokens.tile_cosine
    distance = 1 - cosine.to(tokens.features.dtype)
    kept, closed = start.kept(tokens), start.closed
    if not across:
        kept, closed = tokens.by_tile(kept), tokens.by_tile(closed)
    shares = split_over_tiles(budget, 1 if across else tokens.grid.tiles)
    if start.indices.shape[1]:
        nearest = distance_to_kept(distance, kept)
        picks = farthest_points(distance, shares[0], nearest=nearest, taken=closed)
    else:
        # The smallest distance of a token is to itself, so the second smallest is to its nearest
        # neighbour; like the published code, this does not mask the diagonal.
        second = distance.topk(min(2, distance.shape[1]), dim=1, largest=False).values[:, -1]
        # Relative: where every token has a duplicate, what is left is rounding, as published.
        seed = argmax_within(second, relative=True)[0][:, None]
        nearest = distance.gather(1, seed[:, :, None].expand(-1, -1, distance.shape[1]))[:, 0]
        taken = closed.scatter(1, seed, True)
        others = farthest_points(distance, shares[0] - 1, nearest=nearest, taken=taken)
        picks = torch.cat([seed, others], dim=1)
    return picks if across else join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(_DivPruneParams, continuation=_select)
def divprune(params: _DivPruneParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Max-min cosine distance, starting at the token farthest from its nearest neighbour."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
