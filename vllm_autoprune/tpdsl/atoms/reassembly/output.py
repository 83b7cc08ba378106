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


def nearest_residual(
    strength: float,
    tokens: VisualTokens,
    indices: Tensor,
    anchors: Tensor,
    mergeable: Tensor | None,
) -> Tensor:
    """x_a + strength * (weighted mean of the group - x_a), as released.

    The group of an anchor is itself and the tokens of its tile that are most similar to it; weights
    are exp(0.05 (1 - distance from the centre) - 0.03 likeness to another token of the tile), of
    which the distance is divided by the largest and the likeness is min-max normalised.
    """
    count, kept = tokens.count, indices.shape[1]
    per_tile, device = tokens.grid.per_tile, indices.device
    within = tokens.tile_cosine
    tile = torch.arange(count, device=device) // per_tile
    similarity = tokens.by_image(within).gather(
        2, (indices % per_tile)[:, None].expand(-1, count, -1)
    )
    apart = tile[:, None] != tile[indices][:, None]
    similarity = similarity.masked_fill(apart, -torch.inf)
    place = torch.arange(kept, device=device).expand_as(indices)
    nearest, owner = similarity.max(dim=2)
    owner = owner.scatter(1, indices, place)
    distance = centre_distance(tokens.grid, device)
    far = distance / distance.max().clamp_min(SETTLED)
    itself = torch.eye(per_tile, dtype=torch.bool, device=device)
    likeness = tokens.by_image(within.masked_fill(itself, -torch.inf).amax(dim=2))
    weight = torch.exp(0.05 * (1 - far) - 0.03 * min_max_normalise(likeness))
    joins = nearest.isfinite()  # a tile may have no anchor
    if mergeable is not None:
        joins = joins & mergeable.scatter(1, indices, True)
    weight = weight.masked_fill(~joins, 0.0)
    means = [
        _sum_groups(groups, shares[:, None] * rows.float(), kept)
        / _sum_groups(groups, shares[:, None], kept)
        for groups, shares, rows in zip(owner, weight, tokens.features, strict=True)
    ]
    start = anchors.float()
    return (start + strength * (torch.stack(means) - start)).to(anchors.dtype)


def _sum_groups(owner: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sums ``(P, D)`` of the rows ``(N, D)`` of each group ``(N,)``, in the same order always."""
    if rows.is_cuda:  # where index_add adds in any order
        member = owner == torch.arange(count, device=rows.device)[:, None]
        return member.to(rows.dtype) @ rows
    return rows.new_zeros(count, rows.shape[1]).index_add_(0, owner, rows)


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
