"""Greedy selection, batched and without host syncs: farthest points, and coverage."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.rowwise import argmax_within

HUGE = 2.0**100
"""Value of an infinite or NaN weight, when tokens are ordered by weight alone."""


def fill_by_weight(
    picks: Tensor, gains: Tensor, weight: Tensor, eligible: Tensor | None, floor: float
) -> Tensor:
    """Replace the picks whose gain is at most ``floor`` or NaN by tokens of descending weight.

    picks and gains ``(B, count)``, weight ``(B, N)``, eligible ``(B, N)`` bool. Picks that are kept
    come first, in their order; equal weights go to the lower index. ``count`` must not exceed the
    number of eligible tokens.
    """
    count, tokens = picks.shape[1], weight.shape[1]
    key = weight.float().nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    if eligible is not None:
        key = key.masked_fill(~eligible, -torch.inf)
    priority = 2 * HUGE * torch.arange(count, 0, -1, dtype=key.dtype, device=key.device)
    # An extra column takes the priorities of invalid picks and is cut off.
    key = functional.pad(key, (0, 1))
    key.scatter_(1, picks.where(gains > floor, tokens), priority.expand_as(picks))
    return key[:, :tokens].argsort(dim=1, descending=True, stable=True)[:, :count]


def farthest_points(distance: Tensor, count: int, *, nearest: Tensor, taken: Tensor) -> Tensor:
    """Pick ``count`` tokens, each the farthest from all tokens chosen before, in pick order.

    distance ``(B, N, N)``; nearest ``(B, N)`` is each token's distance to the tokens already
    chosen; taken ``(B, N)`` bool excludes tokens. Returns ``(B, count)`` int64. Picked tokens are
    masked, so an index never repeats, even with duplicates or NaN; ties go to the lower index
    (:func:`argmax_within`).
    ``count`` must not exceed the number of tokens not taken.
    """
    batch, tokens = nearest.shape
    offset = torch.arange(0, batch * tokens, max(tokens, 1), device=nearest.device)
    rows = distance.reshape(batch * tokens, tokens)
    nearest = nearest.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(taken, -torch.inf)
    # A token at minus infinity stays there: fmin returns the smaller number and ignores NaN.
    flat = nearest.view(-1)
    picks = []
    for _ in range(count):
        pick, _ = argmax_within(nearest)
        picks.append(pick)
        at = pick if batch == 1 else offset + pick
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
    offset = torch.arange(0, batch * tokens, max(tokens, 1), device=nearest.device)
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
        nearest = torch.fmin(nearest, rows.index_select(0, offset + pick))
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    fill = weight if fill is None else fill
    return fill_by_weight(torch.stack(picks, 1), torch.cat(gains, 1), fill, free, floor)


def distance_to_others(distance: Tensor) -> Tensor:
    """Distance ``(B, N)`` of each token to the nearest other one, from distances ``(B, N, N)``."""
    tokens = distance.shape[1]
    itself = torch.eye(tokens, dtype=torch.bool, device=distance.device)
    return distance.masked_fill(itself, torch.inf).amin(dim=1)


def distance_to_kept(distance: Tensor, kept: Tensor) -> Tensor:
    """Distance ``(B, N)`` of each token to the nearest kept one, by a mask ``(B, N)``."""
    return distance.masked_fill(~kept[:, :, None], torch.inf).amin(dim=1)


def greedy_coverage(
    degrees: Tensor,
    weight: Tensor,
    count: int,
    *,
    covered: Tensor,
    taken: Tensor,
    floor: float,
    scale: bool = True,
) -> Tensor:
    """Pick ``count`` candidates, each adding most to what is covered, in pick order.

    degrees ``(B, N, R)``: how well each candidate covers each row; covered ``(B, R)``: how well
    earlier picks do; taken ``(B, N)`` bool excludes candidates. With ``scale``, gains are
    multiplied by weight ``(B, N)``. From the first gain of at most ``floor`` on, candidates come by
    descending weight. Returns ``(B, count)`` int64, unique; ties go to the lower index
    (:func:`argmax_within`). ``count`` must not exceed the number of candidates not taken.
    """
    batch = degrees.shape[0]
    if count == 0:
        return torch.empty(batch, 0, dtype=torch.int64, device=degrees.device)
    parts = [
        _greedy(*image, count, scale) for image in zip(degrees, weight, covered, taken, strict=True)
    ]
    picks, gains = (torch.stack(part) for part in zip(*parts, strict=True))
    return fill_by_weight(picks, gains, weight, ~taken, floor)


def _greedy(
    degrees: Tensor, weight: Tensor, covered: Tensor, taken: Tensor, count: int, scale: bool
) -> tuple[Tensor, Tensor]:
    """Picks and gains ``(count,)`` of one image."""
    excluded, added = taken.clone(), torch.empty_like(degrees)
    picks, gains = [], []
    for _ in range(count):
        torch.sub(degrees, covered, out=added)
        total = added.clamp_min_(0).sum(dim=1)
        if scale:
            total = total * weight
        pick, gain = argmax_within(total.masked_fill(excluded, -torch.inf)[None], relative=True)
        picks.append(pick)
        gains.append(gain)
        excluded.index_fill_(0, pick, True)
        covered = torch.maximum(covered, degrees.index_select(0, pick)[0])
    return torch.cat(picks), torch.cat(gains)[:, 0]


def covered_by(degrees: Tensor, kept: Tensor) -> Tensor:
    """How well the candidates of a mask ``(B, N)`` cover each row, at least 0: ``(B, R)``."""
    return degrees.masked_fill(~kept[:, :, None], 0.0).amax(dim=1).clamp_min(0)
