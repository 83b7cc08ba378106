"""DivPrune: maximise the smallest pairwise distance of the kept tokens (max-min diversity).

Source: Alvar et al., "DivPrune" (CVPR 2025), and its published code.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.tpdsl.base_policy import BasePolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tiles import join_tiles, split_over_tiles
from vllm_autoprune.tpdsl.tokens import VisualTokens


class DivPruneParams(BasePolicyParams):
    """Parameters of DivPrune."""

    tile_scope: Literal["per_tile", "global"] = Field(
        "per_tile", description="select within each tile or across all tiles of an image"
    )


@base_policy(DivPruneParams)
def divprune(params: DivPruneParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Max-min cosine distance, starting at the token farthest from its nearest neighbour."""
    if params.tile_scope == "global":
        return ReferenceSelection(_spread(tokens.features, budget))
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = _spread(tokens.by_tile(tokens.features), shares[0])
    return ReferenceSelection(join_tiles(picks, tokens, shares))


def _spread(features: Tensor, count: int) -> Tensor:
    """Farthest-point picks ``(B, count)`` of features ``(B, N, D)``.

    Computed in the dtype of the features, as published: in half precision ties are common, and the
    lower index wins.
    """
    norm = features.norm(dim=-1, keepdim=True)
    unit = features / norm.clamp_min(torch.finfo(features.dtype).tiny)
    distance = 1 - unit @ unit.transpose(1, 2)
    batch, size, _ = features.shape
    # The smallest distance of a token is to itself, so the second smallest is to its nearest
    # neighbour; like the published code, this does not mask the diagonal.
    second = distance.topk(min(2, size), dim=1, largest=False).values[:, -1]
    first = second.argmax(dim=1, keepdim=True)
    nearest = distance.gather(1, first[:, :, None].expand(-1, -1, size))[:, 0]
    taken = torch.zeros(batch, size, dtype=torch.bool, device=features.device)
    rest = farthest_points(
        distance, count - 1, nearest=nearest, taken=taken.scatter(1, first, True)
    )
    return torch.cat([first, rest], dim=1)
