"""The picks of farthest-point sampling, one after another: their definition, and a torch loop."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import argmax_within, row_offsets


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
