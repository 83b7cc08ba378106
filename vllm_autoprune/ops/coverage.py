"""Greedy maximisation of coverage, a sum of maxima, without host syncs.

Every candidate covers each of R rows to some degree; a set covers a row as well as the best of its
members. One image at a time: a sum over a batch may be rounded in another way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.ops.filling import fill_by_weight
from vllm_autoprune.ops.rowwise import argmax_within


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
        _greedy(*one, count, scale) for one in zip(degrees, weight, covered, taken, strict=True)
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
