"""Farthest-point selection, batched and without host syncs.

Knows nothing about which distance it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor


def farthest_points(distance: Tensor, count: int, *, nearest: Tensor, taken: Tensor) -> Tensor:
    """``count`` tokens, each the farthest from everything chosen so far, in pick order.

    distance ``(B, N, N)``; nearest ``(B, N)`` is each token's distance to what is already
    chosen; taken ``(B, N)`` bool marks what may not be picked. Returns ``(B, count)`` int64.
    A chosen token is masked, so duplicates and NaN cannot make an index repeat; ties go to the
    lower index. ``count`` must not exceed the number of tokens not taken.
    """
    batch, tokens = nearest.shape
    picks = torch.empty(batch, count, dtype=torch.int64, device=nearest.device)
    for step in range(count):
        pick = nearest.masked_fill(taken, -torch.inf).argmax(dim=1, keepdim=True)
        picks[:, step : step + 1] = pick
        taken = taken.scatter(1, pick, True)
        row = distance.gather(1, pick[:, :, None].expand(-1, -1, tokens))[:, 0]
        nearest = torch.minimum(nearest, row)
    return picks
