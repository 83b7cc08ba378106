"""Farthest-point selection, batched and without host syncs."""

from __future__ import annotations

import torch
from torch import Tensor


def farthest_points(distance: Tensor, count: int, *, nearest: Tensor, taken: Tensor) -> Tensor:
    """Pick ``count`` tokens, each the farthest from all tokens chosen before, in pick order.

    distance ``(B, N, N)``; nearest ``(B, N)`` is each token's distance to the tokens already
    chosen; taken ``(B, N)`` bool excludes tokens. Returns ``(B, count)`` int64. Picked tokens are
    masked, so an index never repeats, even with duplicates or NaN; ties go to the lower index.
    ``count`` must not exceed the number of tokens not taken.
    """
    batch, tokens = nearest.shape
    first = torch.arange(0, batch * tokens, max(tokens, 1), device=nearest.device)
    rows = distance.reshape(batch * tokens, tokens)
    # A token at minus infinity stays there: fmin returns the smaller number and ignores NaN.
    nearest = nearest.masked_fill(taken, -torch.inf)
    flat = nearest.view(-1)
    picks = []
    for _ in range(count):
        pick = nearest.argmax(dim=1)
        picks.append(pick)
        at = pick if batch == 1 else first + pick
        flat.index_fill_(0, at, -torch.inf)
        torch.fmin(nearest, rows.index_select(0, at), out=nearest)
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    return torch.stack(picks, dim=1)
