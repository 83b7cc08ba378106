"""Geometry of tokens once what they all share is taken out (Cen-Prune).

Features of one image are concentrated: their cosines lie close together, and differences between
tokens are small beside the mean token. One image (or tile) at a time, because a mean over a batch
may be rounded in another way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.ops.similarity import NONZERO_NORM

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
    """Minus the mean cosine of each token with the others ``(B, n)``, of rows ``(B, n, D)``."""
    unit = rows / rows.norm(dim=-1, keepdim=True).clamp_min(NONZERO_NORM)
    # The sum of cosines with all tokens is one product with the sum of unit vectors.
    total = torch.stack([one @ one.sum(dim=0) for one in unit])
    own = unit.square().sum(dim=-1)
    return (own - total) / max(1, rows.shape[1] - 1)
