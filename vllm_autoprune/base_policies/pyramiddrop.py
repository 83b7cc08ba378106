"""PyramidDrop: keep visual tokens by the last instruction token's attention in a middle layer.

Source: Xing et al., "PyramidDrop" (CVPR 2025), and its published code. It drops in stages, after
a quarter, a half and three quarters of the layers (8, 16 and 24 of 32), each time by the attention
of the next layer. Before prefill only one stage is possible [ours]: it keeps K tokens.
"""

from __future__ import annotations

from pydantic import Field

from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.prefix import MOST_LAYERS
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _PyramidDropParams(PolicyParams):
    """Parameters of PyramidDrop."""

    layer: int | None = Field(
        None,
        ge=0,
        le=MOST_LAYERS,
        description="layer whose attention ranks, counted from 0; null: a quarter of the model's "
        "layers, the published first stage. The published last stage (24 of 32) runs three "
        "quarters of the prefill to save the rest of it",
    )


def _native(params: _PyramidDropParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """Kept tokens of one stage, in raster order."""
    picks = pyramiddrop(params, tokens, budget).picks
    return PublishedSelection(tuple(picks.sort(dim=1).values))


@base_policy(
    _PyramidDropParams,
    needs=frozenset({"language"}),
    native=_native,
    # Attention of a layer needs the layers before it.
    ranking_layers=lambda params, layers: layers // 4 if params.layer is None else params.layer,
)
def pyramiddrop(
    params: _PyramidDropParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """One stage: the tokens with most attention from the last instruction token."""
    language = tokens.require_language()
    layer = language.layers // 4 if params.layer is None else params.layer
    score = language.last_token_attention(layer, tokens.count)
    return ReferenceSelection(rank_descending(score)[:, :budget])
