"""CDPruner's selection as its published code does it: the baseline. Needs torch only.

The kernel L is formed in full, and each of the K steps is a few calls. The published code takes one
image at a time; here one loop handles all images of a batch, which favours the baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(
    features: Tensor, patches: Tensor, text: Tensor, tiles: int, count: int, sign: int = -1
) -> Tensor:
    """Picks ``(B * T, count)`` within tiles, ascending.

    features ``(B, N, D)``, patches ``(B, N, C)``, text ``(B, M, C)``, N = T n. Relevance is
    scaled over all tiles of an image, similarity and selection are tile by tile.
    """
    return greedy(kernel(features, patches, text, tiles, sign), count).sort(dim=1).values


def kernel(features: Tensor, patches: Tensor, text: Tensor, tiles: int, sign: int = -1) -> Tensor:
    """L = diag(r) S diag(r) of every tile, ``(B * T, n, n)`` float32."""
    batch, tokens, width = features.shape
    unit = (features / features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(batch * tiles, tokens // tiles, width)
    similarity = unit @ unit.transpose(1, 2)

    patches = patches / patches.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    r = sign * (patches @ text.transpose(1, 2)).mean(dim=-1)
    low, high = r.amin(dim=1, keepdim=True), r.amax(dim=1, keepdim=True)
    r = ((r - low + 1e-6) / (high - low)).view(batch * tiles, -1)
    return r[:, :, None] * similarity * r[:, None, :]


def greedy(matrix: Tensor, count: int) -> Tensor:
    """The ``count`` picks of the published loop on L ``(B, n, n)``, in pick order."""
    batch, tokens, _ = matrix.shape
    image = torch.arange(batch, device=matrix.device)
    gain = matrix.diagonal(dim1=1, dim2=2).clone()
    factors = matrix.new_zeros(count, batch, tokens)
    picks = torch.empty(count, batch, dtype=torch.int64, device=matrix.device)
    for step in range(count):
        best = gain.argmax(dim=1)
        picks[step] = best
        column, done = factors[:step, image, best], factors[:step]
        projected = torch.einsum("tb,tbn->bn", column, done)
        update = (matrix[image, best] - projected) / gain[image, best].sqrt()[:, None]
        factors[step] = update
        gain -= update.square()
        gain[image, best] = -torch.inf
    return picks.T
