"""CDPruner: greedy MAP of a determinantal point process conditioned on the instruction.

Source: Zhang et al., "CDPruner" (NeurIPS 2025), and its published code, which is followed where
paper and code differ (the 1e-6 in the numerator, joint normalisation over tiles).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.greedy import Conditioned, condition
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance, sharpen
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles


class _CDPrunerParams(PolicyParams):
    """Parameters of CDPruner."""

    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="exponential weight of relevance; null: relevance itself, as published",
    )


def _condition(params: _CDPrunerParams, tokens: VisualTokens, fixed: Tensor) -> Conditioned:
    """The cosines of each tile conditioned on the tokens at fixed ``(B, A)`` that lie in it."""
    return condition_by_tile(tokens.tile_cosine, tokens, fixed)


def condition_by_tile(similarity: Tensor, tokens: VisualTokens, fixed: Tensor) -> Conditioned:
    """Similarity ``(B * T, n, n)`` of each tile conditioned on the tokens at fixed ``(B, A)``."""
    tiles, size = tokens.grid.tiles, tokens.grid.per_tile
    if tiles == 1:
        return condition(similarity, fixed)
    tile = torch.arange(tiles, device=fixed.device)[None, :, None]
    inside = (fixed // size)[:, None] == tile
    # A token of another tile stands at a place of its own and conditions nothing.
    within = (fixed % size)[:, None].expand_as(inside)
    return condition(similarity, within.flatten(0, 1), inside.flatten(0, 1))


def _continue(params: _CDPrunerParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Greedy MAP from the given tokens: relevance scales the kernel conditioned on them."""
    conditioned = start.conditioned or _condition(params, tokens, start.indices)
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = greedy_map(
        tokens.tile_cosine,
        _quality(params, tokens),
        shares[0],
        eligible=tokens.by_tile(~start.closed),
        conditioned=conditioned,
    )
    return join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(
    _CDPrunerParams, needs=frozenset({"instruction"}), continuation=_continue, condition=_condition
)
def cdpruner(params: _CDPrunerParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Greedy MAP on L = diag(r) S diag(r) per tile, with relevance r normalised over all tiles."""
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = greedy_map(tokens.tile_cosine, _quality(params, tokens), shares[0])
    return ReferenceSelection(join_tiles(picks, tokens, shares))


def _quality(params: _CDPrunerParams, tokens: VisualTokens) -> Tensor:
    """Relevance ``(B * T, n)``, normalised over all tiles of an image."""
    return tokens.by_tile(sharpen(normalised_relevance(tokens), params.theta))


def normalised_relevance(tokens: VisualTokens) -> Tensor:
    """Signed relevance ``(B, N)``, min-max normalised over all tiles of an image."""
    instruction = tokens.require_instruction()
    relevance = instruction.sign * instruction_relevance(instruction)
    return min_max_normalise(relevance, offset=1e-6)
