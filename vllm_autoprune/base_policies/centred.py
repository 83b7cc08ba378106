"""Centred similarity of Cen-Prune, and its weights: larger for tokens unlike the others.

Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code. Shared by Cen-DivPrune
and Cen-CDPruner.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.centring import (
    WeightMap,
    map_weight,
    mean_dissimilarity,
    scale_to_unit_variance,
    subtract_mean,
)
from vllm_autoprune.ops.similarity import plain_cosines
from vllm_autoprune.tpdsl.base_policy import BasePolicyParams
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens


class CentredParams(BasePolicyParams):
    """Parameters of both Cen policies."""

    scale_variance: bool = Field(
        False,
        description="divide every channel by its deviation in the image first, as published for "
        "Qwen2.5-VL",
    )
    weight: WeightMap = Field(
        "minmax",
        description="weight of a token by its mean dissimilarity to the others; sigmoid: as "
        "published for Qwen2.5-VL; none: all alike",
    )
    centre: bool = Field(True, description="subtract the mean token before tokens are compared")
    tile_scope: TileScope = Field(
        "per_tile", description="select within each tile or across all tiles of an image"
    )


def scoped_rows(params: CentredParams, tokens: VisualTokens, values: Tensor) -> Tensor:
    """Values ``(B, N, ...)`` of each set of tokens that a selection chooses from, tile or image."""
    return values if params.tile_scope == "global" else tokens.by_tile(values)


def centred_geometry(params: CentredParams, tokens: VisualTokens) -> tuple[Tensor, Tensor]:
    """Similarity ``(R, n, n)`` and weight ``(R, n)`` of R tiles, or images, in float32."""
    rows = scoped_rows(params, tokens, tokens.features).float()
    if params.scale_variance:
        rows = scale_to_unit_variance(rows)
    similarity = plain_cosines(subtract_mean(rows) if params.centre else rows)
    return similarity, map_weight(mean_dissimilarity(rows), params.weight)
