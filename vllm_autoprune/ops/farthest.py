"""Farthest-point selection, batched and without host syncs."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.ops.filling import fill_by_weight
from vllm_autoprune.ops.rowwise import argmax_within


def farthest_points(distance: Tensor, count: int, *, nearest: Tensor, taken: Tensor) -> Tensor:
    """Pick ``count`` tokens, each the farthest from all tokens chosen before, in pick order.

    distance ``(B, N, N)``; nearest ``(B, N)`` is each token's distance to the tokens already
    chosen; taken ``(B, N)`` bool excludes tokens. Returns ``(B, count)`` int64. Picked tokens are
    masked, so an index never repeats, even with duplicates or NaN; ties go to the lower index
    (:func:`argmax_within`).
    ``count`` must not exceed the number of tokens not taken.
    """
    batch, tokens = nearest.shape
    first = torch.arange(0, batch * tokens, max(tokens, 1), device=nearest.device)
    rows = distance.reshape(batch * tokens, tokens)
    nearest = nearest.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(taken, -torch.inf)
    # A token at minus infinity stays there: fmin returns the smaller number and ignores NaN.
    flat = nearest.view(-1)
    picks = []
    for _ in range(count):
        pick, _ = argmax_within(nearest)
        picks.append(pick)
        at = pick if batch == 1 else first + pick
        flat.index_fill_(0, at, -torch.inf)
        torch.fmin(nearest, rows.index_select(0, at), out=nearest)
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    return torch.stack(picks, dim=1)


def weighted_farthest_points(
    distance: Tensor,
    weight: Tensor,
    count: int,
    *,
    nearest: Tensor,
    taken: Tensor,
    floor: float,
    leading: Tensor | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """Pick ``count`` tokens by weight times distance to the tokens chosen before, in pick order.

    Arguments as of :func:`farthest_points`; weight ``(B, N)``, at least 0. Where nothing is chosen
    yet (nearest is infinite) the first pick is the token farthest from its nearest neighbour,
    whatever its weight. leading ``(B, count)`` are forced picks, -1 where a pick is free: they come
    first in their rows. From the first score of at most ``floor`` on, tokens come by descending
    fill ``(B, N)``, by default the weight.
    """
    batch, tokens = nearest.shape
    first = torch.arange(0, batch * tokens, max(tokens, 1), device=nearest.device)
    rows = distance.reshape(batch * tokens, tokens)
    free, begins = ~taken, nearest.isinf().all(dim=1)
    picks, gains = [], []
    for step in range(count):
        score = weight * nearest
        if step == 0:
            score = torch.where(begins[:, None], distance_to_others(distance), score)
        pick, gain = argmax_within(score.masked_fill(taken, -torch.inf))
        if step == 0:
            gain = gain.masked_fill(begins[:, None], torch.inf)
        if leading is not None:
            forced = leading[:, step] >= 0
            pick = torch.where(forced, leading[:, step], pick)
            gain = gain.masked_fill(forced[:, None], torch.inf)
        picks.append(pick)
        gains.append(gain)
        taken = taken.scatter(1, pick[:, None], True)
        # fmin ignores NaN, which minimum would spread to all tokens.
        nearest = torch.fmin(nearest, rows.index_select(0, first + pick))
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    fill = weight if fill is None else fill
    return fill_by_weight(torch.stack(picks, 1), torch.cat(gains, 1), fill, free, floor)


def distance_to_others(distance: Tensor) -> Tensor:
    """Distance ``(B, N)`` of each token to the nearest other one, from distances ``(B, N, N)``."""
    tokens = distance.shape[1]
    own = torch.eye(tokens, dtype=torch.bool, device=distance.device)
    return distance.masked_fill(own, torch.inf).amin(dim=1)


def distance_to_kept(distance: Tensor, kept: Tensor) -> Tensor:
    """Distance ``(B, N)`` of each token to the nearest kept one, by a mask ``(B, N)``."""
    return distance.masked_fill(~kept[:, :, None], torch.inf).amin(dim=1)
