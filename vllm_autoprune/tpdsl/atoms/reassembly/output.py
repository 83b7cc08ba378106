"""Output: row of each anchor, from the members of its group and their weights.

Every function returns rows ``(B, P, D)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.atoms.partitions import SETTLED
from vllm_autoprune.tpdsl.atoms.scoring import centre_distance
from vllm_autoprune.tpdsl.registry import AtomCall, added
from vllm_autoprune.tpdsl.tokens import VisualTokens

ROUNDING = 1e-5
"""Gain in cosine below which two members count as equally central, as in any group of two."""


class BlendCall(AtomCall):
    """Parameters of residual and average; with strength 0 no row changes."""

    strength: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="weight of the mean of the group in the row; 0: rows do not change",
    )

    @property
    def idle(self) -> bool:
        """Whether no row changes."""
        return self.strength == 0.0


class NearestCall(BlendCall):
    """Parameters of anchor_weighted_residual."""

    nearest: bool = added(
        False,
        description="each token is merged into its most similar kept one alone, kept ones into "
        "themselves, with softmax weights that favour the centre and what resembles no other token",
    )


class ExchangeCall(AtomCall):
    """Parameters of exchange; cosines differ by at most 2, so with a margin of 2 no row changes."""

    margin: float = Field(
        10.0,
        ge=0.0,
        le=10.0,
        description="smallest gain in cosine to the group's mean; from 2 on, rows do not change",
    )

    @property
    def idle(self) -> bool:
        """Whether no row changes."""
        return self.margin >= 2.0


@dataclass(frozen=True, slots=True)
class Groups:
    """Anchors and the groups of tokens assigned to them.

    indices ``(B, P)`` of the anchors and their rows anchors ``(B, P, D)``; weights ``(B, N, P)``,
    zero for kept tokens; own ``(B, P)``, the weight of an anchor in its own group; member
    ``(B, N, P)`` bool, true for the anchor with the largest share of a token, if its weight is
    positive.
    """

    tokens: VisualTokens
    indices: Tensor
    anchors: Tensor
    weights: Tensor
    own: Tensor
    member: Tensor

    def sums(self) -> tuple[Tensor, Tensor]:
        """Weighted sums of rows ``(B, P, D)`` float32, and sums of weights ``(B, P, 1)``."""
        # One image at a time: bit-identical in any batch, with a single float32 copy.
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


def nearest_weights(tokens: VisualTokens, indices: Tensor, mergeable: Tensor | None) -> Tensor:
    """Weights ``(B, N, P)`` of tokens in the groups of their nearest anchors, as released.

    Not normalised: exp(0.05 (1 - distance from the centre) - 0.03 likeness to another token), of
    which the distance is divided by the largest and the likeness is min-max normalised.
    """
    count, kept = tokens.count, torch.arange(indices.shape[1], device=indices.device)
    similarity = tokens.cosine.gather(2, indices[:, None, :].expand(-1, count, -1))
    owner = similarity.argmax(dim=2).scatter(1, indices, kept.expand_as(indices))
    distance = centre_distance(tokens.grid, indices.device)
    diagonal = torch.eye(count, dtype=torch.bool, device=indices.device)
    likeness = min_max_normalise(tokens.cosine.masked_fill(diagonal, -torch.inf).amax(dim=2))
    far = distance / distance.max().clamp_min(SETTLED)
    weight = torch.exp(0.05 * (1 - far) - 0.03 * likeness)
    if mergeable is not None:
        weight = weight.masked_fill(~(mergeable.scatter(1, indices, True)), 0.0)
    return torch.zeros_like(similarity).scatter(2, owner[:, :, None], weight[:, :, None])


def average(call: BlendCall, groups: Groups) -> Tensor:
    """(1 - strength) * x_a + strength * weighted mean of the members and the anchor itself."""
    rows, total = groups.sums()
    anchors, own = groups.anchors.float(), groups.own[:, :, None]
    total = total + own
    mean = (rows + own * anchors) / total.clamp_min(SETTLED)
    mean = torch.where(total > SETTLED, mean, anchors)
    return ((1 - call.strength) * anchors + call.strength * mean).to(groups.anchors.dtype)


def exchange(call: ExchangeCall, groups: Groups) -> Tensor:
    """Row of the member nearest to the group's mean direction, if nearer than x_a by the margin.

    Weights only define the mean direction: choosing the member of largest weight would never
    replace an anchor, because no weight exceeds the anchor's own.
    """
    indices, cosine = groups.indices[:, None, :], groups.tokens.cosine
    weights = groups.weights.scatter(1, indices, groups.own[:, None, :])
    along = matmul_each(cosine, weights)
    length = (along * weights).sum(dim=1, keepdim=True).clamp_min(SETTLED).sqrt()
    near = along / length
    best, member = near.masked_fill(~groups.member, -torch.inf).max(dim=1)
    replaced = best - near.gather(1, indices)[:, 0] > call.margin + ROUNDING
    features = groups.tokens.features
    rows = features.gather(1, member[:, :, None].expand(-1, -1, features.shape[2]))
    return torch.where(replaced[:, :, None], rows.to(groups.anchors.dtype), groups.anchors)
