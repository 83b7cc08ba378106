"""Mean similarity of each token to its most similar tokens, or to its neighbours on the grid.

Nothing of the size of the similarity matrix is made beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_of_largest_others(similarity: Tensor, count: int) -> Tensor:
    """Mean of each row's ``count`` largest entries off the diagonal, ``(B, n, n) -> (B, n)``.

    Needs 1 <= count < n.
    """
    # Of the count + 1 largest entries one is surplus: the diagonal if it is among them, that is if
    # it is at least the smallest of them, and otherwise that smallest one.
    values = similarity.topk(count + 1, dim=-1).values
    own = similarity.diagonal(dim1=1, dim2=2)
    return (values.sum(dim=-1) - torch.maximum(own, values[..., -1])) / count


def mean_of_neighbours(similarity: Tensor, height: int, width: int, radius: int) -> Tensor:
    """Mean similarity of each token to the others within ``radius`` on its grid, ``(B, n)``.

    similarity ``(B, n, n)`` between the ``n = height * width`` tokens of one grid in raster order;
    distance is Chebyshev distance. The mean of a token without neighbours is 0.
    """
    window = torch.arange(-radius, radius + 1, device=similarity.device)
    to_y = torch.arange(height, device=similarity.device)[:, None] + window
    to_x = torch.arange(width, device=similarity.device)[:, None] + window
    in_y, in_x = (to_y >= 0) & (to_y < height), (to_x >= 0) & (to_x < width)
    # Shape (height, width, rows of the window, columns of the window), later one row per token.
    inside = in_y[:, None, :, None] & in_x[:, None, :]
    inside[:, :, radius, radius] = False
    down, right = to_y.clamp(0, height - 1) * width, to_x.clamp(0, width - 1)
    place = (down[:, None, :, None] + right[:, None, :]).view(1, height * width, -1)
    inside = inside.view(height * width, -1)
    near = similarity.gather(2, place.expand(similarity.shape[0], -1, -1))
    return near.where(inside, 0.0).sum(dim=-1) / inside.sum(dim=-1).clamp_min(1)
