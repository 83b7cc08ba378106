"""Small numeric rules that several atoms share: normalising, ranking, masks.

Knows nothing about atoms or states.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLAT = 1e-12
"""Below this range a score is constant and says nothing."""


def normalise(score: Tensor, offset: float = 0.0) -> Tensor:
    """Min-max over the last axis, ``(..., N) -> (..., N)``; a constant score becomes all ones.

    ``offset`` is added to the numerator only, as CDPruner's code does with 1e-6.
    """
    low = score.amin(dim=-1, keepdim=True)
    spread = score.amax(dim=-1, keepdim=True) - low
    scaled = (score - low + offset) / spread.clamp_min(FLAT)
    return torch.where(spread < FLAT, torch.ones_like(scaled), scaled)


def ranked(score: Tensor) -> Tensor:
    """Indices ``(..., N)`` by descending score; ties go to the lower index."""
    return score.argsort(dim=-1, descending=True, stable=True)


def mask_of(indices: Tensor, count: int) -> Tensor:
    """Indices ``(B, K)`` as a membership mask ``(B, count)``."""
    mask = torch.zeros(indices.shape[0], count, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, indices, True)


def raster(mask: Tensor, count: int) -> Tensor:
    """The ``count`` true positions of a mask ``(B, N)``, ascending, ``(B, count)``.

    Shapes stay static, so nothing waits for the device; rows must hold exactly ``count``.
    """
    order = torch.sort(mask.to(torch.uint8), dim=1, descending=True, stable=True).indices
    return order[:, :count]


def evenly(batch: int, tokens: int, count: int, device: torch.device) -> Tensor:
    """``count`` evenly spread positions out of ``tokens``, ``(batch, count)``: the last resort."""
    spread = (torch.arange(count, device=device) * tokens + tokens // 2) // count
    return spread.clamp_max(tokens - 1).expand(batch, count)
