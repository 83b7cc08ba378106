"""Cen-DivPrune: max-min diversity of centred tokens, weighted towards unusual ones.

Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code.
"""

from __future__ import annotations

from torch import Tensor

from vllm_autoprune.base_policies.cen_cdpruner import CentredParams, centred_geometry, scoped_rows
from vllm_autoprune.ops.greedy import distance_to_kept, weighted_farthest_points
from vllm_autoprune.tpdsl.base_policy import Given, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles

FLOOR = 1e-6
"""Weighted distance at or below which the other tokens come by weight."""


class CenDivPruneParams(CentredParams):
    """Parameters of Cen-DivPrune."""


def _select(params: CenDivPruneParams, tokens: VisualTokens, budget: int, given: Given) -> Tensor:
    """Weighted max-min distance, starting from the given tokens."""
    similarity, weight = centred_geometry(params, tokens)
    distance = 1 - similarity
    whole = params.tile_scope == "global"
    shares = split_over_tiles(budget, 1 if whole else tokens.grid.tiles)
    picks = weighted_farthest_points(
        distance,
        weight,
        shares[0],
        nearest=distance_to_kept(distance, scoped_rows(params, tokens, given.kept(tokens))),
        taken=scoped_rows(params, tokens, given.closed),
        floor=FLOOR,
    )
    return picks if whole else join_tiles(picks, tokens, shares, given.next_tile(tokens))


@base_policy(CenDivPruneParams, given=_select)
def cen_divprune(
    params: CenDivPruneParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Max-min distance of centred tokens, weighted by dissimilarity to all others."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
