"""Farthest-point sampling: each pick is the token farthest from all tokens chosen before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_autoprune.ops.farthest_torch import Chosen, Walk, Weighting, walk_torch


def distances(similarity: Tensor) -> Tensor:
    """Turn similarity ``(B, N, N)`` into distance 1 - similarity, in place; infinite to itself."""
    distance = similarity.neg_().add_(1)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance


def farthest_points(distance: Tensor, count: int, chosen: Chosen) -> Tensor:
    """Farthest-point sampling, ``(B, count)`` int64 in pick order, as :class:`Walk` says.

    distance ``(B, N, N)``. On a CUDA device all picks are one launch of a Triton kernel, if Triton
    works there.
    """
    walk = fastest_walk(distance.device, distance.shape[1])
    return walk(Walk(distance, chosen, count))


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
    its weight. leading ``(B, count)`` and floor are those of :class:`Walk` and :class:`Weighting`;
    fill ``(B, N)`` is by default the weight. Launches as :func:`farthest_points`.
    """
    apart = distance.amin(dim=1)
    fill = weight if fill is None else fill
    walk = fastest_walk(distance.device, distance.shape[1])
    weighting = Weighting(weight, apart, fill, floor)
    return walk(Walk(distance, chosen, count, weighting, leading))


def fastest_walk(device: torch.device, tokens: int) -> Callable[[Walk], Tensor]:
    """The fastest implementation of :class:`Walk` that works on a device, for N tokens."""
    if device.type != "cuda":
        return walk_torch
    try:
        from vllm_autoprune.ops.farthest_triton import walk_triton, works
    except ImportError:
        return walk_torch
    return walk_triton if works(tokens) else walk_torch
