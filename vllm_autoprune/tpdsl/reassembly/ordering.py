"""Ordering: in which order the language model reads the kept rows.

Knows nothing about what the rows hold. Every function returns a permutation ``(B, P)`` of
``chosen.indices``, which ascend, or None where they stay as they stand. Position ids follow the
rows, so another order than raster moves tokens within the picture that the model believes to see:
legal, and for a search to try.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.numerics import places, ranked
from vllm_autoprune.tpdsl.outcome import Chosen


def raster(chosen: Chosen, count: int) -> None:
    """By place in the image."""


def score(chosen: Chosen, count: int) -> Tensor:
    """By quality, the best first; ties by place."""
    assert chosen.quality is not None, "a policy that orders by quality has scored"
    return ranked(chosen.quality.gather(1, chosen.indices))


def pick(chosen: Chosen, count: int) -> Tensor:
    """As the base policy picked them, exchanged tokens last and by place."""
    picks = chosen.reference.picks
    every = torch.ones(picks.shape[0], count, dtype=torch.bool, device=picks.device)
    return places(picks, every).gather(1, chosen.indices).argsort(dim=1, stable=True)
