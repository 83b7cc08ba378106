"""FastV: keep the visual tokens with most attention from the last prompt token in an early layer.

Source: Chen et al., "An Image is Worth 1/2 Tokens After Layer 2" (ECCV 2024), and its published
code, which prunes before layer 2 by the attention of layer 1. Here the same scores select
before prefill, and K is the number of tokens that enter the model [ours].
"""

from __future__ import annotations

from pydantic import Field

from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.tpdsl.base_policy import PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.prefix import MOST_LAYERS
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _FastVParams(PolicyParams):
    """Parameters of FastV."""

    layer: int = Field(
        2,
        ge=1,
        le=MOST_LAYERS,
        description="layer before which FastV prunes, from 0; the layer before it is read",
    )


@base_policy(
    _FastVParams,
    needs=frozenset({"language"}),
    # Attention of a layer needs the layers before it.
    ranking_layers=lambda params, layers: params.layer - 1,
)
def fastv(params: _FastVParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """The tokens with most attention from the last instruction token, averaged over heads."""
    language = tokens.require_language()
    score = language.last_token_attention(params.layer - 1, tokens.count)
    return ReferenceSelection(rank_descending(score)[:, :budget])
