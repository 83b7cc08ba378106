"""Score fusion (S): combine several normalised signals into one token quality g.

Every function takes its call, the signals ``(B, N)`` normalised to 0..1, one weight per signal, and
the reference selection ``(B, P)`` in pick order. The weights are parameters of the signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise, pick_confidence
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, OneOf, added, atom


class ProductFusion(AtomCall):
    """Parameters of weighted_product_fusion."""

    eps: float = Field(
        1e-3,
        ge=1e-6,
        le=0.05,
        description="floor of a signal, so that a single 0 does not make the product 0",
    )
    normalised: bool = added(
        False, description="divide the weights by their sum, and min-max normalise the product"
    )


class ConfidenceFusion(ProductFusion):
    """Parameters of reference_confidence_weighted_product_fusion."""

    beta: float = Field(
        0.5, ge=0.0, le=4.0, description="relative gain of the base policy's first pick"
    )


Fusion = Annotated[AtomCall, OneOf("score_fusion")]


@atom("score_fusion")
def weighted_sum_fusion(
    call: AtomCall, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Weighted sum of the signals."""
    # Added one by one: a reduction over a stacked axis rounds differently in a batch and alone.
    total = torch.zeros_like(signals[0])
    for signal, weight in zip(signals, weights, strict=True):
        total = total + weight * signal
    return total


@atom("score_fusion", ProductFusion)
def weighted_product_fusion(
    call: ProductFusion, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Product of the signals, each raised to the power of its weight (equation 11)."""
    total = torch.zeros_like(signals[0])
    for signal, weight in zip(signals, weights, strict=True):
        total = total + weight * signal.clamp_min(call.eps).log()
    return min_max_normalise((total / sum(weights)).exp()) if call.normalised else total.exp()


@atom("score_fusion", ConfidenceFusion)
def reference_confidence_weighted_product_fusion(
    call: ConfidenceFusion, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Weighted product, increased for tokens that the base policy picked early."""
    gain = 1 + call.beta * pick_confidence(picks, signals[0].shape[1])
    return weighted_product_fusion(call, signals, weights, picks) * gain


def run_fusion(
    call: AtomCall, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Min-max normalise signals ``(B, N)`` and fuse them into token quality g ``(B, N)`` >= 0."""
    scaled = min_max_normalise(torch.stack(list(signals), dim=1)).unbind(dim=1)
    fused = ATOMS.of(call).function(call, scaled, weights, picks)
    assert isinstance(fused, Tensor)
    return fused
