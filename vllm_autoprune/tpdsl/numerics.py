"""Row-wise tensor helpers shared by atoms and base policies: normalising, ranking, masks.

All of them keep shapes static, so none of them synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLAT = 1e-12
"""Range below which a score counts as constant."""


def normalise(score: Tensor, offset: float = 0.0) -> Tensor:
    """Min-max normalise the last axis, ``(..., N) -> (..., N)``; a constant score becomes all ones.

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

    Every row must have exactly ``count`` true positions.
    """
    order = torch.sort(mask.to(torch.uint8), dim=1, descending=True, stable=True).indices
    return order[:, :count]


def evenly(batch: int, tokens: int, count: int, device: torch.device) -> Tensor:
    """``count`` evenly spaced positions in ``0..tokens - 1``, ``(batch, count)``."""
    spread = (torch.arange(count, device=device) * tokens + tokens // 2) // count
    return spread.clamp_max(tokens - 1).expand(batch, count)


def confidence(picks: Tensor, count: int) -> Tensor:
    """``1 - rank / P`` for picks ``(B, P)`` in pick order, 0 for other tokens, ``(B, count)``."""
    batch, picked = picks.shape
    falling = 1 - torch.arange(picked, device=picks.device, dtype=torch.float32) / max(1, picked)
    none = torch.zeros(batch, count, device=picks.device)
    return none.scatter_(1, picks, falling.expand(batch, -1))


def places(order: Tensor, allowed: Tensor) -> Tensor:
    """Position ``(B, N)`` int64 of each token in an order ``(B, M)`` of token indices.

    N for a token that is not in the order or not in the mask ``allowed`` ``(B, N)``.
    """
    batch, count = allowed.shape
    last = torch.full((batch, count), count, dtype=torch.int64, device=order.device)
    rising = torch.arange(order.shape[1], device=order.device).expand(batch, -1)
    return last.scatter_(1, order, rising).masked_fill(~allowed, count)


def products(left: Tensor, right: Tensor) -> Tensor:
    """``(B, n, k) @ (B, k, m)``, one product per image: bit-identical alone and in a batch."""
    return torch.stack([a @ b for a, b in zip(left, right, strict=True)])
