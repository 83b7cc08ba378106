"""Rows of a batch of matrices, picked by index.

Knows nothing about what a row stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_places(at: Tensor, tokens: int) -> Tensor:
    """Indices ``(B, K)`` into each image's rows as ``(B * K,)`` into the rows of all of them."""
    first = torch.arange(0, at.shape[0] * tokens, tokens, device=at.device)
    return (at + first[:, None]).flatten()


def rows_at(values: Tensor, at: Tensor) -> Tensor:
    """Rows ``(B, K, D)`` of values ``(B, N, D)`` at ``(B, K)``.

    Whole rows are copied; ``gather`` with an expanded index looks up every number by itself, which
    takes ten times as long.
    """
    batch, tokens, width = values.shape
    rows = values.reshape(batch * tokens, width)
    return rows.index_select(0, flat_places(at, tokens)).view(batch, -1, width)
