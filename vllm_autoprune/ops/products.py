"""Matrix products whose bits do not depend on what else is in the batch.

Knows nothing about what is multiplied.

A batched product may be cut up differently for one matrix and for eight, and sums that are cut up
differently round differently. Here every matrix is multiplied by itself, so an image gets the same
bits alone and in a batch. The loop over the batch costs nothing where the matrices are large.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

ALIGNED = 16
"""Float32 numbers in a cache line: rows that begin on one are summed the same way everywhere."""

_PANELS = 4
"""Into how many strips the lower triangle is cut: 10 of 16 blocks are then computed."""

_WIDE_PANEL = 64
"""Rows below which a strip is too thin to be multiplied at full speed."""

_STRIP = 2**18
"""Float32 numbers of a strip that is still in the cache when it is read again: 1 MiB."""

_NONZERO = 1e-30
"""Least length that is divided by."""


def cosines_with(rows: Tensor, vectors: Tensor) -> Tensor:
    """Cosines ``(B, n, m)`` float32 of rows ``(B, n, C)`` with vectors ``(B, m, C)``.

    All in float32, whatever the dtypes are; a zero vector has cosine 0 with everything.
    """
    batch, tokens, width = rows.shape
    out = torch.empty(batch, tokens, vectors.shape[1], dtype=torch.float32, device=rows.device)
    step = tokens if rows.device.type != "cpu" else max(1, _STRIP // width)
    for image in range(batch):
        target = functional.normalize(vectors[image].float(), dim=-1, eps=_NONZERO)
        for low in range(0, tokens, step):
            part = rows[image, low : low + step].float()
            length = part.norm(dim=-1, keepdim=True).clamp_min_(_NONZERO)
            torch.div(part @ target.T, length, out=out[image, low : low + step])
    return out


def cosines(features: Tensor, norm: Tensor) -> Tensor:
    """Cosines ``(B, n, n)`` float32 between rows of features ``(B, n, D)`` of length ``(B, n, 1)``.

    Rows are divided by their length in the features' own dtype and only then cast: the published
    policies do it so, and in half precision the order changes which token wins. A zero row has
    cosine 0 with everything. Besides the result only one image's float32 rows are held.
    """
    batch, tokens, _ = features.shape
    length = norm.clamp_min(torch.finfo(features.dtype).tiny)
    out = torch.empty(batch, tokens, tokens, dtype=torch.float32, device=features.device)
    if features.device.type != "cpu":  # strips are too little work for a GPU
        for image in range(batch):
            unit = (features[image] / length[image]).float()
            torch.mm(unit, unit.T, out=out[image])
        return out
    unit = torch.empty(features.shape[1:], dtype=torch.float32)
    for image in range(batch):
        _gram_of_directions(features[image], length[image], unit, out[image])
    return out


def _gram_of_directions(features: Tensor, length: Tensor, unit: Tensor, out: Tensor) -> None:
    """Fill ``out`` ``(n, n)`` strip by strip: the lower triangle is computed, the upper copied.

    A strip of rows is divided, cast and multiplied while it is in the cache.
    """
    tokens = features.shape[0]
    step = max(_WIDE_PANEL, -(-tokens // _PANELS))
    for low in range(0, tokens, step):
        high = min(low + step, tokens)
        unit[low:high] = features[low:high] / length[low:high]
        torch.mm(unit[low:high], unit[:high].T, out=out[low:high, :high])
        out[:low, low:high] = out[low:high, :low].T
