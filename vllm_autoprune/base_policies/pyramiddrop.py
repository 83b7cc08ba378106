"""PyramidDrop: keep visual tokens by the last instruction token's attention in a middle layer.

Source: Xing et al., "PyramidDrop" (CVPR 2025), and its published code. It drops in stages, after
a quarter, a half and three quarters of the layers (8, 16 and 24 of 32), each time by the attention
of the next layer. Before prefill only one stage is possible [ours]: it keeps K tokens.
"""

from __future__ import annotations

from pydantic import Field

from vllm_autoprune.base_policies.attended import MOST_LAYERS, attended_by_last
from vllm_autoprune.tpdsl.base_policy import (
    BasePolicyParams,
    Native,
    Reference,
    base_policy,
    counted,
)
from vllm_autoprune.tpdsl.numerics import ranked
from vllm_autoprune.tpdsl.tokens import VisualTokens


class PyramidDropParams(BasePolicyParams):
    """Parameters of PyramidDrop."""

    layer: int | None = Field(
        None,
        ge=0,
        le=MOST_LAYERS,
        description="layer whose attention ranks, counted from 0; null: a quarter of the model's "
        "layers, the published first stage. The published last stage (24 of 32) runs three "
        "quarters of the prefill to save the rest of it",
    )


def native(params: PyramidDropParams, tokens: VisualTokens, budget: int | None) -> Native:
    """Kept tokens of one stage, in raster order."""
    picks = pyramiddrop(params, tokens, counted("pyramiddrop", budget)).picks
    return Native(tuple(picks.sort(dim=1).values))


@base_policy(PyramidDropParams, needs=frozenset({"language"}), native=native)
def pyramiddrop(params: PyramidDropParams, tokens: VisualTokens, budget: int) -> Reference:
    """One stage: the tokens with most attention from the last instruction token."""
    language = tokens.require_language()
    layer = language.layers // 4 if params.layer is None else params.layer
    return Reference(ranked(attended_by_last(language, layer, tokens.count))[:, :budget])
