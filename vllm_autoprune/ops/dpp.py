"""Greedy MAP inference for a determinantal point process, batched and without host syncs.

Knows nothing about where similarity and quality come from.

Source: Chen et al. 2018 (fast greedy MAP, incremental Cholesky), as CDPruner uses it; the rules
for exhausted rank are ours, because the published loop then returns fewer than K tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXHAUSTED = 1e-10
"""Residual determinant below which the kernel has no rank left to tell tokens apart."""

_DIVISOR = 1e-12


def greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    *,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """The ``count`` picks of greedy MAP on L = diag(q) S diag(q), in pick order.

    similarity ``(B, N, N)``, quality ``(B, N)``, both float32; anchors ``(B, A)`` are forced
    first picks on which the rest is conditioned; eligible ``(B, N)`` bool limits the rest.
    Returns ``(B, count)`` int64, unique in each row even where the kernel's rank is below
    ``count`` or the input holds NaN: then by descending quality, ties to the lower index.
    ``count`` must not exceed the number of eligible tokens.
    """
    batch, tokens = quality.shape
    forced = 0 if anchors is None else anchors.shape[1]
    taken = torch.zeros_like(quality, dtype=torch.bool) if eligible is None else ~eligible
    residual = similarity.diagonal(dim1=1, dim2=2) * quality * quality
    factors = quality.new_zeros(batch, count, tokens)
    picks = torch.empty(batch, count, dtype=torch.int64, device=quality.device)

    for step in range(count):
        if anchors is not None and step < forced:
            pick = anchors[:, step : step + 1]
        else:
            gain, best = residual.masked_fill(taken, -torch.inf).max(dim=1, keepdim=True)
            spare = quality.masked_fill(taken, -torch.inf).argmax(dim=1, keepdim=True)
            pick = torch.where(gain > EXHAUSTED, best, spare)
        picks[:, step : step + 1] = pick
        taken = taken.scatter(1, pick, True)
        if step + 1 == count:
            break
        wide = pick[:, :, None].expand(-1, -1, tokens)
        row = similarity.gather(1, wide)[:, 0] * quality.gather(1, pick) * quality
        done = factors[:, :step]
        seen = done.gather(2, pick[:, None, :].expand(-1, step, -1)).transpose(1, 2)
        scale = residual.gather(1, pick).clamp_min(_DIVISOR).sqrt()
        update = (row - torch.bmm(seen, done)[:, 0]) / scale
        factors[:, step] = update
        residual = residual - update * update
    return picks
