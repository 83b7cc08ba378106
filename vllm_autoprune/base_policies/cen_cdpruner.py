"""Cen-CDPruner: greedy MAP on centred similarity, weighted by relevance and dissimilarity.

Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.cdpruner import condition_by_tile, normalised_relevance
from vllm_autoprune.base_policies.centred import CentredParams, centred_geometry, scoped_rows
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.dpp_torch import Conditioned, condition
from vllm_autoprune.tpdsl.base_policy import Given, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tiles import join_tiles, split_over_tiles
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


class CenCDPrunerParams(CentredParams):
    """Parameters of Cen-CDPruner."""

    relevance: bool = Field(True, description="false: weigh by dissimilarity alone")


class CenCDPrunerCoreParams(CenCDPrunerParams):
    """Parameters of Cen-CDPruner without the question."""

    relevance: Literal[False] = Field(False, description="a core reads no question")


def _reads(params: CenCDPrunerParams) -> frozenset[Need]:
    return frozenset({"instruction"}) if params.relevance else frozenset()


def _condition(params: CenCDPrunerParams, tokens: VisualTokens, given: Tensor) -> Conditioned:
    """The centred similarity conditioned on the tokens at given ``(B, A)``."""
    similarity, _ = centred_geometry(params, tokens)
    if params.tile_scope == "global":
        return condition(similarity, given)
    return condition_by_tile(similarity, tokens, given)


def _continue(params: CenCDPrunerParams, tokens: VisualTokens, budget: int, given: Given) -> Tensor:
    """Greedy MAP from the given tokens: the weights scale the similarity conditioned on them."""
    conditioned = given.conditioned or _condition(params, tokens, given.indices)
    eligible = scoped_rows(params, tokens, ~given.closed)
    return _picks(params, tokens, budget, given.next_tile(tokens), eligible, conditioned)


@base_policy(
    CenCDPrunerParams,
    needs=frozenset({"instruction"}),
    given=_continue,
    condition=_condition,
    reads=_reads,
    core=CenCDPrunerCoreParams,
)
def cen_cdpruner(
    params: CenCDPrunerParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Greedy MAP on L = diag(q) S diag(q), S centred, q relevance times dissimilarity."""
    return ReferenceSelection(_picks(params, tokens, budget))


def _picks(
    params: CenCDPrunerParams,
    tokens: VisualTokens,
    budget: int,
    first: int = 0,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
) -> Tensor:
    similarity, quality = centred_geometry(params, tokens)
    if params.relevance:
        quality = quality * scoped_rows(params, tokens, normalised_relevance(tokens))
    whole = params.tile_scope == "global"
    shares = split_over_tiles(budget, 1 if whole else tokens.grid.tiles)
    picks = greedy_map(similarity, quality, shares[0], eligible=eligible, conditioned=conditioned)
    return picks if whole else join_tiles(picks, tokens, shares, first)
