"""The picks of farthest-point sampling, one after another: their definition, and a torch loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import fill_by_weight
from vllm_autoprune.ops.rowwise import argmax_within, row_offsets


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that are already chosen before the first pick."""

    nearest: Tensor
    """``(B, N)``: distance of each token to the nearest chosen one; infinite if there is none. NaN
    counts as infinite."""
    taken: Tensor
    """``(B, N)`` bool: tokens that must not be picked, which include the chosen ones."""

    @classmethod
    def none(cls, like: Tensor) -> Chosen:
        """No token is chosen; ``like`` ``(B, N)`` gives shape, dtype and device."""
        nearest = torch.full_like(like, torch.inf)
        return cls(nearest, torch.zeros_like(nearest, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class Weighting:
    """Scores that are weight times distance, all ``(B, N)`` float32, and what is picked after them.

    From the first score of at most ``floor``, or NaN, on, picks are by descending ``fill``. A
    forced pick, and the first of an image without chosen tokens, stand whatever their score.
    """

    weight: Tensor
    """At least 0."""
    apart: Tensor
    """Scores of the first pick in an image without chosen tokens."""
    fill: Tensor
    floor: float


@dataclass(frozen=True, slots=True)
class Walk:
    """One call of farthest-point sampling for B images of N tokens.

    The score of a token is its distance to the nearest token chosen or picked before. Picked tokens
    are masked, so an index never repeats; ties go to the lower index
    (:func:`~vllm_autoprune.ops.rowwise.argmax_within`).
    """

    distance: Tensor
    """``(B, N, N)``."""
    chosen: Chosen
    count: int
    """Picks of an image: at most the number of tokens that are not taken."""
    weighting: Weighting | None = None
    leading: Tensor | None = None
    """``(B, count)`` int64: forced picks, which come first in their rows, and -1 for every free
    pick."""


def walk_torch(walk: Walk) -> Tensor:
    """Picks ``(B, count)`` int64 of a :class:`Walk`: the reference for the Triton kernel."""
    batch, tokens = walk.chosen.nearest.shape
    if walk.count == 0:
        return torch.empty(batch, 0, dtype=torch.int64, device=walk.distance.device)
    offset = row_offsets(batch, tokens, walk.distance.device)
    rows = walk.distance.reshape(batch * tokens, tokens)
    known = walk.chosen.nearest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    nearest = known.masked_fill(walk.chosen.taken, -torch.inf).contiguous()
    nearest_of_all = nearest.view(-1)  # of the tokens of all images, by `offset`
    # Images without chosen tokens, whose first pick has scores of its own.
    begins = known.isinf().all(dim=1, keepdim=True)
    picks = []
    bounds = []
    for step in range(walk.count):
        score = nearest
        if walk.weighting is not None:
            score = walk.weighting.weight * nearest
            if step == 0:
                score = torch.where(begins, walk.weighting.apart, score)
            score = score.masked_fill(nearest == -torch.inf, -torch.inf)
        pick, bound = argmax_within(score)
        if walk.leading is not None:
            forced = walk.leading[:, step]
            pick = torch.where(forced >= 0, forced, pick)
        picks.append(pick)
        bounds.append(bound)
        if step + 1 == walk.count:
            break
        index = pick if batch == 1 else offset + pick
        nearest_of_all.index_fill_(0, index, -torch.inf)
        # fmin returns the smaller number and ignores NaN: a picked token stays at minus infinity.
        torch.fmin(nearest, rows.index_select(0, index), out=nearest)
    order = torch.stack(picks, dim=1)
    if walk.weighting is None:
        return order
    gains = torch.cat(bounds, dim=1)
    gains[:, :1].masked_fill_(begins, torch.inf)
    if walk.leading is not None:
        gains.masked_fill_(walk.leading >= 0, torch.inf)
    weighting = walk.weighting
    return fill_by_weight(
        order, gains, weighting.fill, ~walk.chosen.taken, weighting.floor
    )
