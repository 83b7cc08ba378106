"""Assignment: which kept tokens (anchors) a discarded token lends itself to.

Knows nothing about how much it counts there. Every function returns shares ``(B, N, P)`` float32
from cosines ``(B, N, P)`` of all tokens to the anchors at ``indices`` ``(B, P)``; a token's shares
add up to 1, or are all 0 where it has no anchor. Rows of kept tokens are not looked at.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import AtomCall
from vllm_autoprune.tpdsl.tokens import Grid


class SoftCall(AtomCall):
    """Parameters of the soft assignment."""

    tau: float = Field(0.1, ge=0.01, le=1.0, description="temperature; small: nearest anchor alone")


class LocalCall(AtomCall):
    """Parameters of the local assignment."""

    radius: int = Field(3, ge=1, le=12, description="how far an anchor may lie, in tokens")


def nearest(call: AtomCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """To the most similar anchor, the first one on a tie."""
    return _all_to(similarity.argmax(dim=2), similarity)


def soft(call: SoftCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """To all anchors, by a softmax of cosine / tau."""
    return (similarity / call.tau).softmax(dim=2)


def local(call: LocalCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """To the most similar anchor within the radius and the tile; without one, to none."""
    near = neighbourhood(grid, call.radius, similarity.device)[indices].transpose(1, 2)
    found = similarity.masked_fill(~near, -torch.inf)
    return _all_to(found.argmax(dim=2), similarity) * near


def neighbourhood(grid: Grid, radius: int, device: torch.device) -> Tensor:
    """``(N, N)`` bool: both tokens in one tile, within ``radius`` rows and columns."""
    token = torch.arange(grid.tokens, device=device)
    tile, inside = token // grid.per_tile, token % grid.per_tile
    y, x = inside // grid.width, inside % grid.width
    apart = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    return (tile[:, None] == tile) & (apart <= radius)


def _all_to(owner: Tensor, similarity: Tensor) -> Tensor:
    return torch.zeros_like(similarity).scatter_(2, owner[:, :, None], 1.0)
