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
    implementation = _fastest_implementation(similarity.device, quality.shape[1])
    return implementation(similarity, quality, count, anchors, eligible, conditioned)


def compile_for(tokens: int, device: torch.device) -> None:
    """Compile what :func:`greedy_map` runs for up to N tokens, so that no image waits for it."""
    for power in range((tokens - 1).bit_length() + 1):
        _fastest_implementation(device, 1 << power)


def _fastest_implementation(device: torch.device, tokens: int) -> Callable[..., Tensor]:
    if device.type != "cuda":
        return greedy_map_torch
    try:
        from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works
    except ImportError:
        return greedy_map_torch
    return greedy_map_triton if works(tokens) else greedy_map_torch
