"""Greedy MAP inference for a determinantal point process, by a device's fastest implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import GIVEN, Conditioned, greedy_map_torch


def greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    *,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
) -> Tensor:
    """Greedy MAP on L = diag(q) S diag(q): ``count`` picks in pick order.

    similarity ``(B, N, N)`` is S and quality ``(B, N)`` is q, both float32. anchors ``(B, A)`` are
    forced first picks, on which the other picks are conditioned; eligible ``(B, N)`` bool limits
    those others. With ``conditioned``, picks continue from the tokens that it was conditioned on:
    none of them is picked again, and they cost no steps. Returns ``(B, count)`` int64, unique in
    each row.

    Ties go to the lower index (:func:`~vllm_autoprune.ops.rowwise.argmax_within`). For the first
    pick a diagonal entry of S that is a rounded 1 counts as 1. From the first step at which no gain
    exceeds ``greedy.EXHAUSTED`` (the rank of L is below ``count``) or a gain is NaN, the remaining
    picks are by descending quality. ``count`` must not exceed the number of eligible tokens.

    Picks are identical alone and in a batch. On a CUDA device this is a single Triton kernel, if
    Triton works there.
    """
    if conditioned is not None:
        unconditioned = conditioned.residual > GIVEN
        eligible = unconditioned if eligible is None else eligible & unconditioned
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    tokens = quality.shape[1]
    implementation = fastest_implementation(similarity.device, tokens, fixed + count)
    return implementation(similarity, quality, count, anchors, eligible, conditioned)


def fastest_implementation(
    device: torch.device, tokens: int, count: int
) -> Callable[..., Tensor]:
    """The fastest implementation of :func:`greedy_map` that works on a device, for N and K."""
    if device.type != "cuda":
        return greedy_map_torch
    try:
        from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works
    except ImportError:
        return greedy_map_torch
    return greedy_map_triton if works(tokens, count) else greedy_map_torch
