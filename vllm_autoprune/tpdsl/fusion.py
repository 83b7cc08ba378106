"""Score fusion (S): several normalised signals become one token quality g.

Knows nothing about where the signals come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.numerics import normalise


class ProductFusion(AtomCall):
    """Parameters of weighted_product_fusion."""

    eps: float = Field(1e-3, ge=1e-6, le=0.05, description="floor of a signal, so one 0 can't veto")


Fusion = Annotated[AtomCall, OneOf("score_fusion")]


@atom("score_fusion", ProductFusion)
def weighted_product_fusion(
    call: ProductFusion, signals: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Product of the signals, each raised to its weight (equation 11 of the paper)."""
    # One after the other: a sum over a stacked axis rounds differently in a batch and alone.
    total = torch.zeros_like(signals[0])
    for signal, weight in zip(signals, weights, strict=True):
        total = total + weight * signal.clamp_min(call.eps).log()
    return total.exp()


def run_fusion(call: AtomCall, signals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Token quality g ``(B, N)`` from signals ``(B, N)``, normalised here."""
    fused = ATOMS.of(call).function(call, [normalise(s) for s in signals], weights)
    assert isinstance(fused, Tensor)
    return fused
