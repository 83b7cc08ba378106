"""Greedy MAP with a cap on the tokens of each cell, batched and without host syncs.

The set of allowed tokens depends on earlier picks, so the whole conditioned similarity is updated:
after a pick the outer product of its scaled row is subtracted from S. A step costs N^2 where
:func:`vllm_autoprune.ops.dpp.greedy_map` costs N times the number of earlier steps. All operations
are element-wise, so results are bit-identical alone and in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.ops.dpp_torch import DIVISOR, EXHAUSTED


def capped_greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    *,
    anchors: Tensor,
    eligible: Tensor,
    cells: Tensor,
    cap: int,
) -> Tensor:
    """Greedy MAP as in :func:`vllm_autoprune.ops.dpp.greedy_map`, at most ``cap`` picks per cell.

    similarity ``(B, N, N)``, quality ``(B, N)``; anchors ``(B, A)`` are forced first picks, which
    count towards their cells and may exceed the cap; eligible ``(B, N)`` bool; cells ``(B, N)``
    int64 in 0..N-1. Returns ``(B, count)`` int64, unique. If all eligible tokens are in full cells
    the cap is ignored; once gains are exhausted, the remaining picks are by quality.
    """
    batch, forced = anchors.shape
    first = torch.arange(batch, device=quality.device)
    weight = quality * quality
    lowest = torch.finfo(quality.dtype).min
    spare = quality.nan_to_num(nan=0.0).clamp_min(lowest)
    open_ = eligible.clone()
    occupancy = torch.zeros_like(cells)
    sound = torch.ones(batch, dtype=torch.bool, device=quality.device)
    picks = []
    for step in range(count):
        if step < forced:
            pick = anchors[:, step]
        else:
            room = open_ & (occupancy.gather(1, cells) < cap)
            room = torch.where(room.any(dim=1, keepdim=True), room, open_)
            residual = similarity.diagonal(dim1=1, dim2=2)
            gain, best = (weight * residual).masked_fill(~room, -torch.inf).max(dim=1)
            sound = sound & (gain > EXHAUSTED) & (gain < torch.inf)
            pick = torch.where(sound, best, spare.masked_fill(~room, -torch.inf).argmax(dim=1))
        picks.append(pick)
        open_.scatter_(1, pick[:, None], False)
        cell = cells.gather(1, pick[:, None])
        occupancy.scatter_add_(1, cell, torch.ones_like(cell))
        row = similarity[first, pick]
        pivot = row.gather(1, pick[:, None]).clamp_min(DIVISOR)
        row = row * pivot.rsqrt()
        similarity = similarity - row[:, :, None] * row[:, None, :]
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=quality.device)
    return torch.stack(picks, dim=1)
