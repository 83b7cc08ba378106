"""Cen-CDPruner and Cen-DivPrune: CDPruner and DivPrune in a centred geometry.

Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.cdpruner import condition_by_tile, normalised_relevance
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.greedy import (
    Conditioned,
    condition,
    distance_to_kept,
    weighted_farthest_points,
)
from vllm_autoprune.ops.similarity import (
    WeightMap,
    map_weight,
    mean_dissimilarity,
    plain_cosines,
    scale_to_unit_variance,
    subtract_mean,
)
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens, join_tiles, split_over_tiles


class _CentredParams(PolicyParams):
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


def _scoped_rows(params: _CentredParams, tokens: VisualTokens, values: Tensor) -> Tensor:
    """Values ``(B, N, ...)`` of each set of tokens that a selection chooses from, tile or image."""
    return values if params.tile_scope == "global" else tokens.by_tile(values)


def _centred_geometry(params: _CentredParams, tokens: VisualTokens) -> tuple[Tensor, Tensor]:
    """Similarity ``(R, n, n)`` and weight ``(R, n)`` of R tiles, or images, in float32."""
    rows = _scoped_rows(params, tokens, tokens.features).float()
    if params.scale_variance:
        rows = scale_to_unit_variance(rows)
    similarity = plain_cosines(subtract_mean(rows) if params.centre else rows)
    return similarity, map_weight(mean_dissimilarity(rows), params.weight)


class _CenCDPrunerParams(_CentredParams):
    """Parameters of Cen-CDPruner."""

    relevance: bool = Field(True, description="false: weigh by dissimilarity alone")


class _CenCDPrunerCoreParams(_CenCDPrunerParams):
    """Parameters of Cen-CDPruner without the question."""

    relevance: Literal[False] = Field(False, description="a core reads no question")


def _condition(params: _CenCDPrunerParams, tokens: VisualTokens, fixed: Tensor) -> Conditioned:
    """The centred similarity conditioned on the tokens at fixed ``(B, A)``."""
    similarity, _ = _centred_geometry(params, tokens)
    if params.tile_scope == "global":
        return condition(similarity, fixed)
    return condition_by_tile(similarity, tokens, fixed)


def _continue(
    params: _CenCDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy MAP from the given tokens: the weights scale the similarity conditioned on them."""
    conditioned = start.conditioned or _condition(params, tokens, start.indices)
    eligible = _scoped_rows(params, tokens, ~start.closed)
    return _picks(params, tokens, budget, start.next_tile(tokens), eligible, conditioned)


@base_policy(
    _CenCDPrunerParams,
    needs=frozenset({"instruction"}),
    continuation=_continue,
    condition=_condition,
    reads=lambda params: frozenset({"instruction"} if params.relevance else ()),
    core=_CenCDPrunerCoreParams,
)
def cen_cdpruner(
    params: _CenCDPrunerParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Greedy MAP on L = diag(q) S diag(q), S centred, q relevance times dissimilarity."""
    return ReferenceSelection(_picks(params, tokens, budget))


def _picks(
    params: _CenCDPrunerParams,
    tokens: VisualTokens,
    budget: int,
    first_tile: int = 0,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
) -> Tensor:
    similarity, quality = _centred_geometry(params, tokens)
    if params.relevance:
        quality = quality * _scoped_rows(params, tokens, normalised_relevance(tokens))
    across = params.tile_scope == "global"
    shares = split_over_tiles(budget, 1 if across else tokens.grid.tiles)
    picks = greedy_map(similarity, quality, shares[0], eligible=eligible, conditioned=conditioned)
    return picks if across else join_tiles(picks, tokens, shares, first_tile)


_FLOOR = 1e-6
"""Weighted distance at or below which the other tokens come by weight."""


class _CenDivPruneParams(_CentredParams):
    """Parameters of Cen-DivPrune."""


def _select(params: _CenDivPruneParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Weighted max-min distance, starting from the given tokens."""
    similarity, weight = _centred_geometry(params, tokens)
    distance = 1 - similarity
    across = params.tile_scope == "global"
    shares = split_over_tiles(budget, 1 if across else tokens.grid.tiles)
    picks = weighted_farthest_points(
        distance,
        weight,
        shares[0],
        nearest=distance_to_kept(distance, _scoped_rows(params, tokens, start.kept(tokens))),
        taken=_scoped_rows(params, tokens, start.closed),
        floor=_FLOOR,
    )
    return picks if across else join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(_CenDivPruneParams, continuation=_select)
def cen_divprune(
    params: _CenDivPruneParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Max-min distance of centred tokens, weighted by dissimilarity to all others."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
