"""Farthest-point sampling: each pick is the token farthest from all tokens chosen before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import fill_by_weight
from vllm_autoprune.ops.rowwise import argmax_within, row_offsets


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that are already chosen before the first pick."""

    nearest: Tensor
    """``(B, N)``: distance of each token to the nearest chosen one; infinite if there is none."""
    taken: Tensor
    """``(B, N)`` bool: tokens that must not be picked, which include the chosen ones."""

    @classmethod
    def none(cls, like: Tensor) -> Chosen:
        """No token is chosen; ``like`` ``(B, N)`` gives shape, dtype and device."""
        nearest = torch.full_like(like, torch.inf)
        return cls(nearest, torch.zeros_like(nearest, dtype=torch.bool))


def distances(similarity: Tensor) -> Tensor:
    """Turn similarity ``(B, N, N)`` into distance 1 - similarity, in place; to itself: infinite."""
    distance = similarity.neg_().add_(1)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance


def farthest_points(distance: Tensor, count: int, chosen: Chosen) -> Tensor:
    """Farthest-point sampling, ``(B, count)`` int64 in pick order.

    distance ``(B, N, N)``. Picked tokens are masked, so an index never repeats, even with
    duplicates or NaN; ties go to the lower index (:func:`argmax_within`). ``count`` must not exceed
    the number of tokens that are not taken. On a CUDA device all picks are one launch of a Triton
    kernel, if Triton works there.
    """
    finite = chosen.nearest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    nearest = finite.masked_fill(chosen.taken, -torch.inf)
    walk = fastest_walk(distance.device, distance.shape[1])
    picks, _ = walk(distance, nearest, nearest, count)
    return picks


def weighted_farthest_points(
    distance: Tensor,
    weight: Tensor,
    count: int,
    chosen: Chosen,
    *,
    floor: float,
    leading: Tensor | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """Farthest-point sampling by weight times distance to the tokens chosen before, in pick order.

    distance ``(B, N, N)`` is that of :func:`distances`; weight ``(B, N)``, at least 0. In an image
    without chosen tokens the first pick is the token farthest from its nearest neighbour, whatever
    its weight. leading ``(B, count)`` holds forced picks, which come first in their rows, and -1
    for every free pick. From the first score of at most ``floor`` on, picks are by descending fill
    ``(B, N)``, by default the weight. Launches as :func:`farthest_points`.
    """
    taken = chosen.taken
    begins = chosen.nearest.isinf().all(dim=1, keepdim=True)
    apart = distance.amin(dim=1)
    first_scores = torch.where(begins, apart, weight * chosen.nearest)
    walk = fastest_walk(distance.device, distance.shape[1])
    picks, gains = walk(
        distance,
        chosen.nearest.masked_fill(taken, -torch.inf),
        first_scores.masked_fill(taken, -torch.inf),
        count,
        weight,
        leading,
    )
    # A forced pick, and the first of an image, stand whatever their score.
    gains[:, :1].masked_fill_(begins, torch.inf)
    if leading is not None:
        gains.masked_fill_(leading >= 0, torch.inf)
    fill = weight if fill is None else fill
    return fill_by_weight(picks, gains, fill, ~taken, floor)


class Walk(Protocol):
    """The picks of farthest-point sampling, one after another."""

    def __call__(
        self,
        distance: Tensor,
        nearest: Tensor,
        first_scores: Tensor,
        count: int,
        weight: Tensor | None = None,
        leading: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Picks ``(B, count)`` int64, and the bound of :func:`argmax_within` at each of them.

        distance ``(B, N, N)``; nearest ``(B, N)``, minus infinity for tokens that must not be
        picked; first_scores ``(B, N)`` are those of the first pick. Later scores are ``nearest``,
        times weight ``(B, N)`` if there is one. leading ``(B, count)`` holds forced picks, and -1.
        """


def walk_torch(
    distance: Tensor,
    nearest: Tensor,
    first_scores: Tensor,
    count: int,
    weight: Tensor | None = None,
    leading: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch implementation of :class:`Walk`, the reference for the Triton kernel."""
    batch, tokens = nearest.shape
    offset = row_offsets(batch, tokens, distance.device)
    rows = distance.reshape(batch * tokens, tokens)
    nearest = nearest.clone(memory_format=torch.contiguous_format)
    nearest_of_all = nearest.view(-1)  # of the tokens of all images, by `offset`
    score = first_scores
    picks = []
    gains = []
    for step in range(count):
        pick, gain = argmax_within(score)
        if leading is not None:
            pick = torch.where(leading[:, step] >= 0, leading[:, step], pick)
        picks.append(pick)
        gains.append(gain)
        if step + 1 == count:
            break
        index = pick if batch == 1 else offset + pick
        nearest_of_all.index_fill_(0, index, -torch.inf)
        # fmin returns the smaller number and ignores NaN: a picked token stays at minus infinity.
        torch.fmin(nearest, rows.index_select(0, index), out=nearest)
        score = nearest
        if weight is not None:
            score = (weight * nearest).masked_fill_(nearest == -torch.inf, -torch.inf)
    if not picks:
        none = torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
        return none, torch.empty_like(none, dtype=nearest.dtype)
    return torch.stack(picks, dim=1), torch.cat(gains, dim=1)


def fastest_walk(device: torch.device, tokens: int) -> Walk:
    """The fastest :class:`Walk` that works on a device, for N tokens."""
    if device.type != "cuda":
        return walk_torch
    try:
        from vllm_autoprune.ops.farthest_triton import walk_triton, works
    except ImportError:
        return walk_torch
    return walk_triton if works(tokens) else walk_torch
