"""SCOPE: greedy coverage of all tokens, weighted by the attention of [CLS].

Source: SCOPE (NeurIPS 2025, arXiv 2510.24214) and its published code.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import covered_by, greedy_coverage
from vllm_autoprune.ops.similarity import plain_cosines
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles

FLOOR = 1e-9
"""Weighted gain at or below which the other tokens come by weight."""


class _ScopeParams(PolicyParams):
    """Parameters of SCOPE."""

    alpha: float = Field(
        1.0, ge=0.0, le=4.0, description="exponent of the attention that weighs a token's gain"
    )


def _select(params: _ScopeParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Greedy coverage, starting from what the given tokens cover."""
    attention = tokens.require_cls_attention().float()
    similarity = plain_cosines(tokens.by_tile(tokens.require_encoder()).float())
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = greedy_coverage(
        similarity,
        tokens.by_tile(attention**params.alpha),
        shares[0],
        covered=covered_by(similarity, tokens.by_tile(start.kept(tokens))),
        taken=tokens.by_tile(start.closed),
        floor=FLOOR,
    )
    return join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(_ScopeParams, needs=frozenset({"cls_attention", "encoder"}), continuation=_select)
def scope(params: _ScopeParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Greedy coverage of the encoder's tokens, each gain times the attention of [CLS]."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
