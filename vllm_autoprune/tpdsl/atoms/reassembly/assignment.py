"""Assignment: kept tokens (anchors) that each discarded token is merged into.

Every function returns shares ``(B, N, P)`` float32 from the cosines ``(B, N, P)`` of all tokens to
the anchors at ``indices`` ``(B, P)``. The shares of a token sum to 1, or are all 0 if it has no
anchor. Shares of kept tokens are ignored.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.tokens import Grid


class SoftCall(AtomCall):
    """Parameters of the soft assignment."""

    tau: float = Field(
        0.1, ge=0.01, le=1.0, description="temperature; small values approach the nearest anchor"
    )


class LocalCall(AtomCall):
    """Parameters of the local assignment."""

    radius: int = Field(3, ge=1, le=12, description="largest distance of an anchor, in tokens")


def nearest(call: AtomCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """All of it to the most similar anchor; ties go to the first."""
    return _one_hot(similarity.argmax(dim=2), similarity)


def soft(call: SoftCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """Softmax of cosine / tau over all anchors."""
    return (similarity / call.tau).softmax(dim=2)


def local(call: LocalCall, similarity: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """All of it to the most similar anchor within the radius and the tile, if there is one."""
    near = neighbourhood(grid, call.radius, similarity.device)[indices].transpose(1, 2)
    nearby = similarity.masked_fill(~near, -torch.inf)
    return _one_hot(nearby.argmax(dim=2), similarity) * near


def neighbourhood(grid: Grid, radius: int, device: torch.device) -> Tensor:
    """Mask ``(N, N)`` of pairs of tokens in one tile within ``radius`` rows and columns."""
    token = torch.arange(grid.tokens, device=device)
    tile, inside = token // grid.per_tile, token % grid.per_tile
    y, x = inside // grid.width, inside % grid.width
    apart = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    return (tile[:, None] == tile) & (apart <= radius)


def _one_hot(owner: Tensor, similarity: Tensor) -> Tensor:
    return torch.zeros_like(similarity).scatter_(2, owner[:, :, None], 1.0)
