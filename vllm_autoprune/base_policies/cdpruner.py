"""CDPruner: greedy MAP of a determinantal point process conditioned on the instruction.

Source: Zhang et al., "CDPruner" (NeurIPS 2025), and its published code, which is followed where
paper and code differ (the 1e-6 in the numerator, joint normalisation over tiles).
"""

from __future__ import annotations

from pydantic import Field

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.kernels import sharpen
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.base_policy import BasePolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tiles import join_tiles, split_over_tiles
from vllm_autoprune.tpdsl.tokens import VisualTokens


class CDPrunerParams(BasePolicyParams):
    """Parameters of CDPruner."""

    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="exponential weight of relevance; null: relevance itself, as published",
    )


@base_policy(CDPrunerParams, needs=frozenset({"instruction"}))
def cdpruner(params: CDPrunerParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Greedy MAP on L = diag(r) S diag(r) per tile, with relevance r normalised over all tiles."""
    instruction = tokens.require_instruction()
    r = min_max_normalise(instruction.sign * instruction_relevance(instruction), offset=1e-6)
    r = tokens.by_tile(sharpen(r, params.theta))
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = greedy_map(tokens.tile_cosine, r, shares[0])
    return ReferenceSelection(join_tiles(picks, tokens, shares))
