"""DivPrune: maximise the smallest pairwise distance of the kept tokens (max-min diversity).

Source: Alvar et al., "DivPrune" (CVPR 2025), and its published code.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import distance_to_kept, farthest_points
from vllm_autoprune.ops.rowwise import argmax_within, mask_from_indices
from vllm_autoprune.tpdsl.base_policy import (
    BasePolicyParams,
    Given,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles


class DivPruneParams(BasePolicyParams):
    """Parameters of DivPrune."""

    tile_scope: Literal["per_tile", "global"] = Field(
        "per_tile", description="select within each tile or across all tiles of an image"
    )


def _continue(params: DivPruneParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Max-min cosine distance, starting from the given tokens."""
    kept = mask_from_indices(start.indices, tokens.count)
    if params.tile_scope == "global":
        return _spread_from(_rounded(tokens.cosine, tokens), kept, start.closed, budget)
    shares = split_over_tiles(budget, tokens.grid.tiles)
    kept, closed = tokens.by_tile(kept), tokens.by_tile(start.closed)
    picks = _spread_from(_rounded(tokens.tile_cosine, tokens), kept, closed, shares[0])
    return join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(DivPruneParams, continuation=_continue)
def divprune(params: DivPruneParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Max-min cosine distance, starting at the token farthest from its nearest neighbour."""
    if params.tile_scope == "global":
        return ReferenceSelection(_spread(_rounded(tokens.cosine, tokens), budget))
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = _spread(_rounded(tokens.tile_cosine, tokens), shares[0])
    return ReferenceSelection(join_tiles(picks, tokens, shares))


def _rounded(cosine: Tensor, tokens: VisualTokens) -> Tensor:
    """Cosines in the dtype of the features, in which the published code computes distances.

    In half precision ties are common, and the lower index wins.
    """
    return cosine.to(tokens.features.dtype)


def _spread(cosine: Tensor, count: int) -> Tensor:
    """Farthest-point picks ``(B, count)`` by cosines ``(B, N, N)``."""
    distance = 1 - cosine
    batch, size, _ = distance.shape
    # The smallest distance of a token is to itself, so the second smallest is to its nearest
    # neighbour; like the published code, this does not mask the diagonal.
    second = distance.topk(min(2, size), dim=1, largest=False).values[:, -1]
    # Relative: where every token has a duplicate, what is left is rounding, as published.
    seed = argmax_within(second, relative=True)[0][:, None]
    nearest = distance.gather(1, seed[:, :, None].expand(-1, -1, size))[:, 0]
    taken = torch.zeros(batch, size, dtype=torch.bool, device=distance.device)
    rest = farthest_points(distance, count - 1, nearest=nearest, taken=taken.scatter(1, seed, True))
    return torch.cat([seed, rest], dim=1)


def _spread_from(cosine: Tensor, kept: Tensor, closed: Tensor, count: int) -> Tensor:
    """Farthest-point picks ``(B, count)`` that continue from the tokens of a mask ``(B, N)``."""
    distance = 1 - cosine
    return farthest_points(distance, count, nearest=distance_to_kept(distance, kept), taken=closed)
