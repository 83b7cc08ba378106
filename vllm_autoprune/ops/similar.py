"""How like its most similar tokens, or its neighbours on the grid, each token is.

Knows nothing about what the answer is used for. Nothing of the size of the similarity matrix is
made beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_of_largest_others(similarity: Tensor, count: int) -> Tensor:
    """Mean of each row's ``count`` largest entries off the diagonal, ``(B, n, n) -> (B, n)``.

    Needs 1 <= count < n.
    """
    # Of one entry more, either the diagonal's own or the least is one too many: the larger of the
    # two, for the diagonal's is among them exactly where it is no less than the least.
    values = similarity.topk(count + 1, dim=-1).values
    own = similarity.diagonal(dim1=1, dim2=2)
    return (values.sum(dim=-1) - torch.maximum(own, values[..., -1])) / count


def mean_of_neighbours(similarity: Tensor, height: int, width: int, radius: int) -> Tensor:
    """Mean similarity of each token to those within ``radius`` on its grid, ``(B, n)``.

    similarity ``(B, n, n)`` between the ``n = height * width`` tokens of one grid in raster order;
    distance is Chebyshev's. A token without neighbours has 0.
    """
    device = similarity.device
    y = torch.arange(height, device=device).repeat_interleave(width)
    x = torch.arange(width, device=device).repeat(height)
    window = torch.arange(-radius, radius + 1, device=device)
    to_y = y[:, None, None] + window[:, None]
    to_x = x[:, None, None] + window
    inside = (to_y >= 0) & (to_y < height) & (to_x >= 0) & (to_x < width)
    inside[:, radius, radius] = False
    inside = inside.flatten(1)
    place = (to_y * width + to_x).flatten(1).where(inside, 0)
    near = similarity.gather(2, place.expand(similarity.shape[0], -1, -1))
    return near.where(inside, 0.0).sum(dim=-1) / inside.sum(dim=-1).clamp_min(1)
