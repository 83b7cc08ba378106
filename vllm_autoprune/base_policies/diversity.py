"""Base policies that keep tokens unlike each other: DivPrune, CDPruner, and both centred."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.greedy import SCOPE, Sets, greedy_policy
from vllm_autoprune.ops.farthest import (
    distances,
    farthest_points,
    weighted_farthest_points,
)
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.rowwise import argmax_within, gather_rows, min_max_normalise
from vllm_autoprune.ops.similarity import (
    WeightMap,
    half_cosines,
    map_weight,
    mean_dissimilarity,
    plain_cosines,
    scale_to_unit_variance,
    subtract_mean,
)
from vllm_autoprune.tpdsl.atoms.scoring import sharpen
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens


class _DivPruneParams(PolicyParams):
    """Parameters of DivPrune."""

    tile_scope: TileScope = Field("per_tile", description=SCOPE)


@greedy_policy(_DivPruneParams, cost=28.8)
def _divprune(
    params: _DivPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Max-min cosine distance, starting at the token farthest from its nearest neighbour.

    Source: Alvar et al., "DivPrune" (CVPR 2025), and its published code. Distances are in the dtype
    of the features, as there: in half precision ties are common, and the lower index wins.
    """
    sets = Sets(tokens, budget, start, params.tile_scope == "global")
    features = tokens.features
    if features.device.type == "cpu" or features.dtype == torch.float32:
        known = tokens.cosine if sets.across else tokens.tile_cosine
        cosine = known.to(features.dtype, copy=True)
    else:
        # Also where cosines are known, so that the choice does not depend on what is cached.
        cosine = half_cosines(sets.of(features), sets.of(tokens.norm), sets.per_image)
    distance = cosine.neg_().add_(1)
    count = sets.shares[0]
    if start.indices.shape[1]:
        nearest = sets.nearest_given(distance)
        return sets.join(farthest_points(distance, count, Chosen(nearest, sets.closed)))
    # The nearest token is the token itself, so the second smallest distance is that to the nearest
    # neighbour. Like the published code, this does not mask the diagonal.
    second = _second_smallest(distance)
    # Relative: where every token has a duplicate, second distances are only rounding, as published.
    seed = argmax_within(second, relative=True)[0][:, None]
    nearest = gather_rows(distance, seed)[:, 0]
    taken = sets.closed.scatter(1, seed, True)
    more = farthest_points(distance, count - 1, Chosen(nearest, taken))
    return sets.join(torch.cat([seed, more], dim=1))


def _second_smallest(distance: Tensor) -> Tensor:
    """Second smallest number of each column, ``(R, n, n) -> (R, n)``; of a single one, that one.

    ``topk`` copies the matrix, and takes 1.6 times as long on a CPU.
    """
    if distance.shape[1] == 1:
        return distance[:, 0]
    smallest, row = distance.min(dim=1, keepdim=True)
    distance.scatter_(1, row, torch.inf)
    second = distance.amin(dim=1)
    distance.scatter_(1, row, smallest)
    return second


class _CDPrunerParams(PolicyParams):
    """Parameters of CDPruner."""

    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="weight exp(theta r / (2 - 2 theta)) of the normalised relevance r; null: r, "
        "as published",
    )


@greedy_policy(_CDPrunerParams, needs=frozenset({"instruction"}), cost=8.5)
def _cdpruner(
    params: _CDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy DPP, kernel diag(r) S diag(r), per tile: cosines S, relevance r normalised over tiles.

    Source: Zhang et al., "CDPruner" (NeurIPS 2025), and its published code, which is followed where
    paper and code differ (the 1e-6 in the numerator, joint normalisation over tiles).
    """
    relevance = min_max_normalise(tokens.require_instruction().relevance(), offset=1e-6)
    sets = Sets(tokens, budget, start)
    return sets.pick_by_map(
        tokens.tile_cosine, sets.of(sharpen(relevance, params.theta))
    )


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
    centre: bool = Field(
        True, description="subtract the mean token before tokens are compared"
    )
    tile_scope: TileScope = Field("per_tile", description=SCOPE)

    def compare(self, sets: Sets) -> tuple[Tensor, Tensor]:
        """Similarity ``(R, n, n)`` and weight ``(R, n)`` of the tokens of each set, in float32.

        Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code.
        """
        rows = sets.of(sets.tokens.features).float()
        if self.scale_variance:
            rows = scale_to_unit_variance(rows)
        tiles = sets.per_image
        compared = subtract_mean(rows, tiles) if self.centre else rows
        similarity = plain_cosines(compared, tiles)
        return similarity, map_weight(mean_dissimilarity(rows, tiles), self.weight)


class _CenCDPrunerParams(_CentredParams):
    """Parameters of Cen-CDPruner."""

    relevance: bool = Field(True, description="false: weigh by dissimilarity alone")


class _CenCDPrunerCoreParams(_CenCDPrunerParams):
    """Parameters of Cen-CDPruner without the question."""

    relevance: Literal[False] = Field(False, description="a core reads no question")


@greedy_policy(
    _CenCDPrunerParams,
    needs=frozenset({"instruction"}),
    reads=lambda params: frozenset({"instruction"} if params.relevance else ()),
    core=_CenCDPrunerCoreParams,
    cost=33.6,
)
def _cen_cdpruner(
    params: _CenCDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy DPP, kernel diag(q) S diag(q): centred cosines S; q, relevance times dissimilarity."""
    sets = Sets(tokens, budget, start, params.tile_scope == "global")
    similarity, quality = params.compare(sets)
    if params.relevance:
        relevance = tokens.require_instruction().relevance()
        quality = quality * sets.of(min_max_normalise(relevance, offset=1e-6))
    return sets.pick_by_map(similarity, quality)


class _CenDivPruneParams(_CentredParams):
    """Parameters of Cen-DivPrune."""


@greedy_policy(_CenDivPruneParams, cost=34.9)
def _cen_divprune(
    params: _CenDivPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Max-min distance of centred tokens, weighted by dissimilarity to all others."""
    sets = Sets(tokens, budget, start, params.tile_scope == "global")
    similarity, weight = params.compare(sets)
    distance = distances(similarity)
    # From the first weighted distance of at most the floor on, tokens are picked by weight.
    chosen = Chosen(sets.nearest_given(distance), sets.closed)
    return sets.join(
        weighted_farthest_points(distance, weight, sets.shares[0], chosen, floor=1e-6)
    )
