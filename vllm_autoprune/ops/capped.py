"""Greedy MAP with a cap on the tokens of each cell, batched and without host syncs.

Knows nothing about what a cell is.

Which tokens are open depends on what was picked, so the whole conditioned similarity is carried
along: after a pick S loses the outer product of its scaled row. That is N^2 work a step where
:mod:`vllm_autoprune.ops.dpp_torch` does N times the steps so far; elementwise, so the bits of an
image do not depend on its batch.
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
    """As :func:`vllm_autoprune.ops.dpp.greedy_map`, at most ``cap`` picks of each cell.

    similarity ``(B, N, N)``, quality ``(B, N)``; anchors ``(B, A)`` are forced first picks that
    count in their cells, even above the cap; eligible ``(B, N)`` bool; cells ``(B, N)`` int64 in
    0..N-1. Returns ``(B, count)`` int64, unique. Where every eligible token lies in a full cell
    the cap is lifted; from the first gain that says nothing the rest is by quality.
    """
    batch, forced = anchors.shape
    first = torch.arange(batch, device=quality.device)
    weight = quality * quality
    lowest = torch.finfo(quality.dtype).min
    spare = quality.nan_to_num(nan=0.0).clamp_min(lowest)
    open_ = eligible.clone()
    held = torch.zeros_like(cells)
    sound = torch.ones(batch, dtype=torch.bool, device=quality.device)
    picks = []
    for step in range(count):
        if step < forced:
            pick = anchors[:, step]
        else:
            room = open_ & (held.gather(1, cells) < cap)
            room = torch.where(room.any(dim=1, keepdim=True), room, open_)
            residual = similarity.diagonal(dim1=1, dim2=2)
            gain, best = (weight * residual).masked_fill(~room, -torch.inf).max(dim=1)
            sound = sound & (gain > EXHAUSTED) & (gain < torch.inf)
            pick = torch.where(sound, best, spare.masked_fill(~room, -torch.inf).argmax(dim=1))
        picks.append(pick)
        open_.scatter_(1, pick[:, None], False)
        cell = cells.gather(1, pick[:, None])
        held.scatter_add_(1, cell, torch.ones_like(cell))
        row = similarity[first, pick]
        left = row.gather(1, pick[:, None]).clamp_min(DIVISOR)
        row = row * left.rsqrt()
        similarity = similarity - row[:, :, None] * row[:, None, :]
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=quality.device)
    return torch.stack(picks, dim=1)
