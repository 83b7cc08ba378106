"""Rest of a greedy selection whose gains are exhausted: the other tokens by descending weight."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

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
