"""Matrix products whose bits do not depend on what else is in the batch.

Knows nothing about what is multiplied.

A batched product may be cut up differently for one matrix and for eight, and sums that are cut up
differently round differently. Here every matrix is multiplied by itself, so an image gets the same
bits alone and in a batch. The loop over the batch costs nothing where the matrices are large.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor

ALIGNED = 16
"""Float32 numbers in a cache line: rows that begin on one are summed the same way everywhere."""

_STRIPS = 4
"""Into how many strips the lower triangle is cut: 10 of 16 blocks are then computed."""

_THIN = 128
"""Rows below which a strip is too thin to be multiplied at full speed."""

_ROWS = 576
"""Rows that are normalised at once where images are smaller than that."""

_CACHED = 2**18
"""Float32 numbers that are still in the cache when they are read again: 1 MiB."""

_NONZERO = 1e-30
"""Least length that is divided by."""


def cosines_with(rows: Tensor, vectors: Tensor) -> Tensor:
    """Cosines ``(B, n, m)`` float32 of rows ``(B, n, C)`` with vectors ``(B, m, C)``.

    All in float32, whatever the dtypes are; a zero vector has cosine 0 with everything.
    """
    batch, tokens, width = rows.shape
    out = torch.empty(batch, tokens, vectors.shape[1], dtype=torch.float32, device=rows.device)
    directions = functional.normalize(vectors.float(), dim=-1, eps=_NONZERO).transpose(1, 2)
    step = tokens if rows.device.type != "cpu" else max(1, _CACHED // width)
    for images in _groups(batch, tokens, step):
        for low in range(0, tokens, step):
            strip = slice(low, low + step)
            part = rows[images, strip].float()
            length = part.norm(dim=-1, keepdim=True).clamp_min_(_NONZERO)
            found = out[images, strip]
            for own, direction, along in zip(part, directions[images], found, strict=True):
                torch.mm(own, direction, out=along)
            found /= length
    return out


def cosines_between(rows: Tensor, columns: Tensor) -> Tensor:
    """Cosines ``(B, n, m)`` float32 of rows ``(B, n, D)`` with columns ``(B, m, D)`` of one dtype.

    Directions are rounded as in :func:`cosines`.
    """
    out = torch.empty(*rows.shape[:2], columns.shape[1], dtype=torch.float32, device=rows.device)
    for row, column, found in zip(_directions(rows), _directions(columns), out, strict=True):
        torch.mm(row, column.T, out=found)
    return out


def _directions(features: Tensor) -> Tensor:
    """``(B, n, D)`` float32 rows of length 1, or 0."""
    tiny = torch.finfo(features.dtype).tiny
    norm: Tensor = features.norm(dim=-1, keepdim=True)
    return (features / norm.clamp_min(tiny)).float()


def cosines(features: Tensor, norm: Tensor) -> Tensor:
    """Cosines ``(B, n, n)`` float32 between rows of features ``(B, n, D)`` of length ``(B, n, 1)``.

    Rows are divided by their length in the features' own dtype and only then cast: the published
    policies do it so, and in half precision the order changes which token wins. A zero row has
    cosine 0 with everything. Besides the result only one image's float32 rows are held, or those of
    a few small ones.
    """
    batch, tokens, width = features.shape
    length = norm.clamp_min(torch.finfo(features.dtype).tiny)
    out = torch.empty(batch, tokens, tokens, dtype=torch.float32, device=features.device)
    together = min(batch, max(1, _ROWS // tokens))
    units = torch.empty(together, tokens, width, dtype=torch.float32, device=features.device)
    # A GPU is filled by the whole product alone.
    strips = min(_STRIPS, tokens // _THIN) if features.device.type == "cpu" else 1
    for images in _groups(batch, tokens, _ROWS):
        grams = out[images]
        held = units[: len(grams)].copy_(features[images] / length[images])
        for unit, gram in zip(held, grams, strict=True):
            if strips > 1:
                _gram_by_strips(unit, -(-tokens // strips), gram)
            else:
                torch.mm(unit, unit.T, out=gram)
    return out


def _groups(batch: int, tokens: int, rows: int) -> Iterator[slice]:
    """Images that have ``rows`` rows together, at least one: small ones share what a call costs."""
    together = max(1, rows // tokens)
    for low in range(0, batch, together):
        yield slice(low, min(low + together, batch))


def _gram_by_strips(unit: Tensor, step: int, out: Tensor) -> None:
    """``unit @ unit.T`` of ``(n, D)`` into ``(n, n)``: the upper triangle is copied."""
    tokens = unit.shape[0]
    for low in range(0, tokens, step):
        high = min(low + step, tokens)
        torch.mm(unit[low:high], unit[:high].T, out=out[low:high, :high])
        out[:low, low:high] = out[low:high, :low].T
