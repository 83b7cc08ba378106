"""Batch-invariant products, cosines and centred features: the same bits alone and in a batch.

A batched matrix product may use a different blocking for one matrix than for eight, and with it a
different rounding. Here each matrix of the batch is multiplied separately, which for large matrices
takes no extra time. Means over an image are computed separately too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.rowwise import FLAT

_STRIPS = 4
"""Number of strips of the lower triangle, so that only 10 of 16 blocks are computed."""

_THIN = 128
"""Number of rows below which the product of a strip is too slow to pay."""

_GPU_THIN = 1024
"""As many rows of a GPU, which has to have enough to do in each launch."""

_ROWS = 576
"""Rows that a CPU normalises at once; several images together have that many if they are small."""

_GPU_ROWS = 4096
"""Rows that a GPU normalises at once, so that small images share a launch."""

_CACHED = 2**18
"""Float32 numbers that fit in the cache: 1 MiB."""

_NONZERO_NORM = 1e-12
"""Lower bound of a norm before division, for rows that were cast to float32."""

_NONZERO = 1e-30
"""Lower bound of a norm before division."""


_ROUNDING = 1e-6
"""Squared distance of unit vectors below which float32 products cannot tell them apart."""


SETTLED = 1e-12
"""Squared length at or below which a centroid has no direction, because its members cancel out."""


def matmul_each(rows: Tensor, columns: Tensor) -> Tensor:
    """``(B, n, k) @ (B, k, m)``, one product per image."""
    return torch.stack([a @ b for a, b in zip(rows, columns, strict=True)])


def strip_size(rows: Tensor) -> int:
    """Number of rows ``(..., n, C)`` to cast to float32 at once: on a CPU what its cache holds."""
    count, width = rows.shape[-2:]
    return count if rows.device.type != "cpu" else max(1, _CACHED // width)


def cosines_with(rows: Tensor, vectors: Tensor) -> Tensor:
    """Cosines ``(B, n, m)`` float32 of rows ``(B, n, C)`` with vectors ``(B, m, C)``.

    Computed in float32 for any dtype; the cosine with a zero vector is 0.
    """
    batch, tokens, _ = rows.shape
    out = torch.empty(
        batch, tokens, vectors.shape[1], dtype=torch.float32, device=rows.device
    )
    directions = functional.normalize(vectors.float(), dim=-1, eps=_NONZERO).transpose(
        1, 2
    )
    step = strip_size(rows)
    for images in _groups(batch, tokens, step):
        for low in range(0, tokens, step):
            strip = slice(low, low + step)
            part = rows[images, strip].float()
            length = part.norm(dim=-1, keepdim=True).clamp_min_(_NONZERO)
            block = out[images, strip]
            for row, direction, cosine in zip(
                part, directions[images], block, strict=True
            ):
                torch.mm(row, direction, out=cosine)
            block /= length
    return out


def cosines_between(rows: Tensor, columns: Tensor) -> Tensor:
    """Cosines ``(B, n, m)`` float32 of rows ``(B, n, D)`` with columns ``(B, m, D)`` of one dtype.

    Rounded as in :func:`cosines`.
    """
    out = torch.empty(
        *rows.shape[:2], columns.shape[1], dtype=torch.float32, device=rows.device
    )
    for row, column, cosine in zip(
        _directions(rows), _directions(columns), out, strict=True
    ):
        torch.mm(row, column.T, out=cosine)
    return out


def _directions(features: Tensor) -> Tensor:
    """Unit vectors ``(B, n, D)`` float32; zero rows stay zero."""
    tiny = torch.finfo(features.dtype).tiny
    norm: Tensor = features.norm(dim=-1, keepdim=True)
    return (features / norm.clamp_min(tiny)).float()


def cosines(features: Tensor, norm: Tensor, tiles: int = 1) -> Tensor:
    """Cosines ``(R, n, n)`` float32 between the rows of features ``(R, n, D)``, norm ``(R, n, 1)``.

    Rows are divided by their norm before the cast to float32, as in the published policies: in half
    precision the order of the two changes which token is picked. The cosine with a zero row is 0.
    Each of the R sets of rows is multiplied separately, but on a GPU the ``tiles`` sets of an image
    in one batch. Besides the result, memory holds the float32 rows of one image, or of a few small
    ones.
    """
    length = norm.clamp_min(torch.finfo(features.dtype).tiny)
    return _cosines_by_length(features, length, tiles)


def plain_cosines(rows: Tensor, tiles: int = 1) -> Tensor:
    """Cosines ``(R, n, n)`` as :func:`cosines`, between rows ``(R, n, D)`` float32."""
    norm: Tensor = rows.norm(dim=-1, keepdim=True)
    return _cosines_by_length(rows, norm.clamp_min_(_NONZERO_NORM), tiles)


def half_cosines(features: Tensor, norm: Tensor, tiles: int = 1) -> Tensor:
    """Cosines ``(R, n, n)`` as :func:`cosines`, in the half precision of the features.

    The products of a GPU's tensor cores, some ten times as fast as float32.
    """
    units = features / norm.clamp_min(torch.finfo(features.dtype).tiny)
    return torch.cat([image @ image.mT for image in units.split(tiles)])


def _cosines_by_length(features: Tensor, length: Tensor, tiles: int) -> Tensor:
    sets, tokens, _ = features.shape
    out = torch.empty(sets, tokens, tokens, dtype=torch.float32, device=features.device)
    on_cpu = features.device.type == "cpu"
    tiles = 1 if on_cpu else tiles
    at_once = _ROWS if on_cpu else _GPU_ROWS
    # The lower triangle is computed by strips of rows and copied to the upper one.
    strips = max(1, min(_STRIPS, tokens // (_THIN if on_cpu else _GPU_THIN)))
    step = -(-tokens // strips)
    for images in _groups(sets // tiles, tiles * tokens, at_once):
        part = slice(images.start * tiles, images.stop * tiles)
        units = torch.empty_like(features[part], dtype=torch.float32)
        torch.div(features[part], length[part], out=units)
        for unit, gram in zip(units.split(tiles), out[part].split(tiles), strict=True):
            for low in range(0, tokens, step):
                strip = slice(low, low + step)
                block = gram[:, strip, : strip.stop]
                torch.bmm(unit[:, strip], unit[:, : strip.stop].mT, out=block)
                if low:
                    gram[:, :low, strip] = gram[:, strip, :low].mT
    return out


def _groups(batch: int, tokens: int, rows: int) -> Iterator[slice]:
    """Slices of images with about ``rows`` rows together, to amortise the cost of a call."""
    together = max(1, rows // tokens)
    for low in range(0, batch, together):
        yield slice(low, min(low + together, batch))


def distance_to_neighbours(similarity: Tensor, height: int, width: int) -> Tensor:
    """Distance of each unit vector from the mean of its four neighbours, ``(B, n, n) -> (B, n)``.

    similarity ``(B, n, n)`` is between the ``n = height * width`` tokens of a grid in raster order,
    whose opposite borders are neighbours. On a grid that is not square the mean is that of the 8
    most similar tokens, which include the token itself. Only products are needed:
    |u - m|^2 = u.u - 2 u.m + m.m.
    """
    batch, count, _ = similarity.shape
    if height == width:
        token = torch.arange(count, device=similarity.device).view(height, width)
        rolled = [token.roll(step, axis) for axis in (0, 1) for step in (1, -1)]
        near = torch.stack(rolled, dim=-1).view(1, count, 4).expand(batch, -1, -1)
    else:
        near = similarity.topk(min(8, count), dim=-1).indices
    size = near.shape[2]
    to_mean = similarity.gather(2, near).mean(dim=-1)
    flat = (near[:, :, :, None] * count + near[:, :, None, :]).reshape(batch, -1)
    within = (
        similarity.reshape(batch, -1).gather(1, flat).view(batch, count, size * size)
    )
    squared = similarity.diagonal(dim1=1, dim2=2) - 2 * to_mean + within.mean(dim=-1)
    # For equal tokens only rounding remains, and its root would be a thousand times larger.
    return squared.where(squared > _ROUNDING, 0.0).sqrt()


def mean_of_neighbours(
    similarity: Tensor, height: int, width: int, radius: int
) -> Tensor:
    """Mean similarity of each token to the others within ``radius`` on its grid, ``(B, n)``.

    similarity ``(B, n, n)`` between the ``n = height * width`` tokens of one grid in raster order;
    distance is Chebyshev distance. The mean of a token without neighbours is 0.
    """
    window = torch.arange(-radius, radius + 1, device=similarity.device)
    to_y = torch.arange(height, device=similarity.device)[:, None] + window
    to_x = torch.arange(width, device=similarity.device)[:, None] + window
    in_y = (to_y >= 0) & (to_y < height)
    in_x = (to_x >= 0) & (to_x < width)
    # Shape (height, width, rows of the window, columns of the window), later one row per token.
    inside = in_y[:, None, :, None] & in_x[:, None, :]
    inside[:, :, radius, radius] = False
    down = to_y.clamp(0, height - 1) * width
    across = to_x.clamp(0, width - 1)
    neighbours = (down[:, None, :, None] + across[:, None, :]).view(height * width, -1)
    inside = inside.view(height * width, -1)
    near = similarity.gather(2, neighbours.expand(similarity.shape[0], -1, -1))
    return near.where(inside, 0.0).sum(dim=-1) / inside.sum(dim=-1).clamp_min(1)


WeightMap = Literal["none", "minmax", "sigmoid"]
"""How a score becomes a weight."""

_EPSILON = 1e-6
"""Added to a variance, a range or a deviation before division."""


def scale_to_unit_variance(rows: Tensor) -> Tensor:
    """Rows ``(B, n, D)`` float32 with every channel divided by its deviation in the image."""
    deviations = [(image - image.mean(dim=0)).square().mean(dim=0) for image in rows]
    return rows * (torch.stack(deviations)[:, None] + _EPSILON).rsqrt()


def subtract_mean(rows: Tensor, tiles: int = 1) -> Tensor:
    """Rows ``(R, n, D)`` minus the mean row of their set; an image has ``tiles`` of the R sets."""
    means = [image.mean(dim=1, keepdim=True) for image in rows.split(tiles)]
    return rows - torch.cat(means)


def mean_dissimilarity(rows: Tensor, tiles: int = 1) -> Tensor:
    """Minus the mean cosine of each token with the others ``(R, n)``, of rows ``(R, n, D)``.

    An image has ``tiles`` of the R sets. The sum is in float64: in concentrated spaces the means
    differ little, and where all tokens are alike they must not differ at all.
    """
    length = rows.norm(dim=-1, keepdim=True)
    units = (rows / length.clamp_min(_NONZERO_NORM)).double()
    # The cosines of a token with all tokens sum to its product with the sum of all unit vectors.
    images = units.split(tiles)
    sums = torch.cat([image @ image.sum(dim=1)[:, :, None] for image in images])
    # A token's cosine with itself is not counted: it is 1, and 0 for a zero row.
    others = torch.add(sums, length > _NONZERO_NORM, alpha=-1)
    dissimilarity: Tensor = others[:, :, 0] / -max(1, rows.shape[1] - 1)
    return dissimilarity


def map_weight(score: Tensor, kind: WeightMap) -> Tensor:
    """Weight ``(R, n)`` float32 in [0, 1] of a score; all ones where the score is constant."""
    if kind == "none":
        return torch.ones_like(score, dtype=torch.float32)
    low, high = torch.aminmax(score, dim=1, keepdim=True)
    spread = high - low
    if kind == "minmax":
        mapped = (score - low) / (spread + _EPSILON)
    else:
        apart = score - score.mean(dim=1, keepdim=True)
        deviation = apart.square().mean(dim=1, keepdim=True).sqrt()
        mapped = torch.sigmoid(apart / (deviation + _EPSILON))
    return mapped.masked_fill_(spread < FLAT, 1.0).float()


def spherical_kmeans(
    cosine: Tensor, clusters: int, iters: int
) -> tuple[Tensor, Tensor]:
    """Spherical k-means on cosines ``(B, N, N)``: labels, and cosines ``(B, N, C)`` to centroids.

    Features are not needed: a centroid is the sum of its members' directions, so its cosines are
    sums of their cosines. The seeds are the token farthest from the image's mean and then farthest
    points. A cluster that loses all its members keeps its centroid.
    """
    batch, tokens, _ = cosine.shape
    count = min(clusters, tokens)
    distance = 1 - cosine
    seed = cosine.sum(dim=2).argmin(dim=1, keepdim=True)
    nearest = distance.gather(1, seed[:, :, None].expand(-1, -1, tokens))[:, 0]
    taken = torch.zeros(batch, tokens, dtype=torch.bool, device=cosine.device)
    taken.scatter_(1, seed, True)
    more = farthest_points(distance, count - 1, Chosen(nearest, taken))
    seeds = torch.cat([seed, more], dim=1)
    near = cosine.gather(2, seeds[:, None, :].expand(-1, tokens, -1))
    for _ in range(iters):
        member = torch.zeros_like(near).scatter_(
            2, near.argmax(dim=2, keepdim=True), 1.0
        )
        along = matmul_each(cosine, member)
        squared = (along * member).sum(dim=1, keepdim=True)
        scale = squared.clamp_min(SETTLED).rsqrt()
        near = torch.where(squared > SETTLED, along * scale, near)
    return near.argmax(dim=2), near
