"""Output: what an anchor's row becomes, given the members of its group and their weights.

Knows nothing about how the weights came about. Every function keeps the shape ``(B, P, D)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import AtomCall
from vllm_autoprune.tpdsl.numerics import products
from vllm_autoprune.tpdsl.partitions import SETTLED
from vllm_autoprune.tpdsl.tokens import VisualTokens

ROUNDING = 1e-5
"""Gain in cosine that is no gain: in a group of two both are as near to the middle."""


class BlendCall(AtomCall):
    """Parameters of the residual and the average; strength 0 leaves every row as it is."""

    strength: float = Field(
        0.0, ge=0.0, le=0.5, description="share of the discarded tokens that is blended in"
    )

    @property
    def idle(self) -> bool:
        """True where no row changes."""
        return self.strength == 0.0


class ExchangeCall(AtomCall):
    """Parameters of the exchange; cosines differ by 2 at most, so a margin of 2 ends it."""

    margin: float = Field(
        10.0, ge=0.0, le=10.0, description="least gain in cosine to the group's mean; 2: never"
    )

    @property
    def idle(self) -> bool:
        """True where no row changes."""
        return self.margin >= 2.0


@dataclass(frozen=True, slots=True)
class Groups:
    """Anchors and what is assigned to them.

    indices ``(B, P)`` and anchors ``(B, P, D)``, their rows; weights ``(B, N, P)``, zero for kept
    tokens; own ``(B, P)``, an anchor's weight in its own group; member ``(B, N, P)`` bool, a token
    with the anchor that has most of it, if it weighs anything there.
    """

    tokens: VisualTokens
    indices: Tensor
    anchors: Tensor
    weights: Tensor
    own: Tensor
    member: Tensor

    def sums(self) -> tuple[Tensor, Tensor]:
        """Weighted sums of members' rows ``(B, P, D)`` float32, and of weights ``(B, P, 1)``."""
        # One image after the other: the same bits in any batch, and one float32 copy at a time.
        pairs = zip(self.weights, self.tokens.features, strict=True)
        rows = torch.stack([weight.T @ features.float() for weight, features in pairs])
        return rows, self.weights.sum(dim=1)[:, :, None]


def residual(call: BlendCall, groups: Groups) -> Tensor:
    """x_a + strength * (weighted mean of the members - x_a)."""
    rows, total = groups.sums()
    anchors = groups.anchors.float()
    mean = rows / total.clamp_min(SETTLED)
    step = torch.where(total > SETTLED, mean - anchors, torch.zeros_like(mean))
    return (anchors + call.strength * step).to(groups.anchors.dtype)


def average(call: BlendCall, groups: Groups) -> Tensor:
    """(1 - strength) * x_a + strength * weighted mean of the members and the anchor itself."""
    rows, total = groups.sums()
    anchors, own = groups.anchors.float(), groups.own[:, :, None]
    total = total + own
    mean = (rows + own * anchors) / total.clamp_min(SETTLED)
    mean = torch.where(total > SETTLED, mean, anchors)
    return ((1 - call.strength) * anchors + call.strength * mean).to(groups.anchors.dtype)


def exchange(call: ExchangeCall, groups: Groups) -> Tensor:
    """The member nearest to the group's mean direction, where it is nearer by the margin.

    A member's weight can never exceed the anchor's own, so weights alone would exchange nothing:
    here they decide where the middle of the group is.
    """
    indices, cosine = groups.indices[:, None, :], groups.tokens.cosine
    weights = groups.weights.scatter(1, indices, groups.own[:, None, :])
    along = products(cosine, weights)
    length = (along * weights).sum(dim=1, keepdim=True).clamp_min(SETTLED).sqrt()
    near = along / length
    best, which = near.masked_fill(~groups.member, -torch.inf).max(dim=1)
    taken = best - near.gather(1, indices)[:, 0] > call.margin + ROUNDING
    features = groups.tokens.features
    rows = features.gather(1, which[:, :, None].expand(-1, -1, features.shape[2]))
    return torch.where(taken[:, :, None], rows.to(groups.anchors.dtype), groups.anchors)
