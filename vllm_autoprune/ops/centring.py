"""Centred features of an image: mean subtracted, variance scaled, mean dissimilarity (Cen-Prune).

Features of one image are concentrated: their cosines lie close together, and differences between
tokens are small beside the mean token. One image (or tile) at a time, because a mean over a batch
may be rounded in another way.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import FLAT
from vllm_autoprune.ops.similarity import NONZERO_NORM

WeightMap = Literal["none", "minmax", "sigmoid"]
"""How a score becomes a weight."""

EPSILON = 1e-6
"""Added to a variance, a range or a deviation that is divided by."""


def scale_to_unit_variance(rows: Tensor) -> Tensor:
    """Rows ``(B, n, D)`` float32 with every channel divided by its deviation in the image."""
    deviations = [(one - one.mean(dim=0)).square().mean(dim=0) for one in rows]
    return rows * (torch.stack(deviations)[:, None] + EPSILON).rsqrt()


def subtract_mean(rows: Tensor) -> Tensor:
    """Rows ``(B, n, D)`` less the mean row of their image."""
    return rows - torch.stack([one.mean(dim=0) for one in rows])[:, None]


def mean_dissimilarity(rows: Tensor) -> Tensor:
    """Minus the mean cosine of each token with the others ``(B, n)``, of rows ``(B, n, D)``.

    Summed in float64: in concentrated spaces the means differ little, and where all tokens are
    alike they must not differ at all.
    """
    directions = rows / rows.norm(dim=-1, keepdim=True).clamp_min(NONZERO_NORM)
    means = []
    for one in directions:
        unit = one.double()
        # The cosines with all tokens are one product with the sum of unit vectors, the own is 1.
        own = one.square().sum(dim=-1).round()
        means.append(own - unit @ unit.sum(dim=0))
    return torch.stack(means) / max(1, rows.shape[1] - 1)


def map_weight(score: Tensor, kind: WeightMap) -> Tensor:
    """Weight ``(R, n)`` float32 in [0, 1] of a score; all ones where the score is constant."""
    low, high = score.amin(dim=1, keepdim=True), score.amax(dim=1, keepdim=True)
    spread = high - low
    ones = torch.ones_like(score)
    if kind == "none":
        return ones.float()
    if kind == "minmax":
        mapped = (score - low) / (spread + EPSILON)
    else:
        apart = score - score.mean(dim=1, keepdim=True)
        deviation = apart.square().mean(dim=1, keepdim=True).sqrt()
        mapped = torch.sigmoid(apart / (deviation + EPSILON))
    return torch.where(spread < FLAT, ones, mapped).float()
