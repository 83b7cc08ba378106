"""Farthest-point sampling: each pick is the token farthest from all tokens chosen before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.farthest_torch import Walk, walk_torch
from vllm_autoprune.ops.greedy import fill_by_weight


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
    """Turn similarity ``(B, N, N)`` into distance 1 - similarity, in place; infinite to itself."""
    distance = similarity.neg_().add_(1)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance


def farthest_points(distance: Tensor, count: int, chosen: Chosen) -> Tensor:
    """Farthest-point sampling, ``(B, count)`` int64 in pick order.

    distance ``(B, N, N)``. Picked tokens are masked, so an index never repeats, even with
    duplicates or NaN; ties go to the lower index
    (:func:`~vllm_autoprune.ops.rowwise.argmax_within`). ``count`` must not exceed the number of
    tokens that are not taken. On a CUDA device all picks are one launch of a Triton kernel, if
    Triton works there.
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


def fastest_walk(device: torch.device, tokens: int) -> Walk:
    """The fastest :class:`Walk` that works on a device, for N tokens."""
    if device.type != "cuda":
        return walk_torch
    try:
        from vllm_autoprune.ops.farthest_triton import walk_triton, works
    except ImportError:
        return walk_torch
    return walk_triton if works(tokens) else walk_torch
