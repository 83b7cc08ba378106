"""Greedy MAP inference for a determinantal point process, batched and without host syncs.

Knows nothing about where similarity and quality come from.

Source: Chen et al. 2018 (fast greedy MAP, incremental Cholesky), as CDPruner uses it; the rules
for exhausted rank are ours, because the published loop then returns fewer than K tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_autoprune.ops.dpp_torch import greedy_map_torch

Form = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None], Tensor]
"""(similarity, quality, count, anchors, eligible) -> picks."""


def greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    *,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """The ``count`` picks of greedy MAP on L = diag(q) S diag(q), in pick order.

    similarity ``(B, N, N)``, quality ``(B, N)``, both float32; anchors ``(B, A)`` are forced
    first picks on which the rest is conditioned; eligible ``(B, N)`` bool limits the rest.
    Returns ``(B, count)`` int64, unique in each row. Ties go to the lower index. From the first
    step on where no eligible token has a gain above ``dpp_torch.EXHAUSTED`` (rank below
    ``count``), or one has NaN for a gain, the rest is by descending quality.
    ``count`` must not exceed the number of eligible tokens.

    An image's picks are the same bits alone and in a batch. On a CUDA device one Triton kernel
    does all of it, where Triton works.
    """
    form = _fastest_form(similarity.device)
    return form(similarity, quality, count, anchors, eligible)


def _fastest_form(device: torch.device) -> Form:
    if device.type != "cuda":
        return greedy_map_torch
    try:
        from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works
    except ImportError:
        return greedy_map_torch
    return greedy_map_triton if works() else greedy_map_torch
