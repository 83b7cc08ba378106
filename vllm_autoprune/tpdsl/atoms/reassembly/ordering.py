"""Ordering: order of the kept rows in the prompt.

Every function returns a permutation ``(B, P)`` of the ascending ``chosen.indices``, or None for no
change. Position ids are assigned to rows in order, so any order but raster changes the position
that the model sees for a token; whether that helps is left to the search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import positions_in_order, rank_descending
from vllm_autoprune.tpdsl.outcome import TokenSelection


def raster(chosen: TokenSelection, count: int) -> None:
    """Raster order of the image."""


def score(chosen: TokenSelection, count: int) -> Tensor:
    """Descending quality; ties in raster order."""
    assert chosen.quality is not None, "a policy that orders by quality computes it"
    return rank_descending(chosen.quality.gather(1, chosen.indices))


def pick(chosen: TokenSelection, count: int) -> Tensor:
    """Pick order of the base policy, then exchanged tokens in raster order."""
    picks = chosen.reference.picks
    every = torch.ones(picks.shape[0], count, dtype=torch.bool, device=picks.device)
    return positions_in_order(picks, every).gather(1, chosen.indices).argsort(dim=1, stable=True)
