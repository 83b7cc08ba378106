"""Average pooling of a grid of tokens to exactly K cells: the resize control of fixed grids.

A control to compare policies with, not a policy: a backbone whose number of tokens does not depend
on the image's size cannot be given a smaller image.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm_autoprune.ops.upload import upload
from vllm_autoprune.tpdsl.executor.refine import keep_all, keep_indices
from vllm_autoprune.tpdsl.outcome import RefinedTokens
from vllm_autoprune.tpdsl.tiles import split_over_tiles
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


def pool_tokens(budget: int, tokens: VisualTokens) -> RefinedTokens:
    """Replace the tokens of each image by the means of K cells ``(B, K, D)``, in raster order.

    The cells of a tile cover it without overlap, and a token on a border counts in each cell by
    the part of its area inside, so every token has the same weight in all cells together. The
    index of a row is the token at the centre of its cell, for positions and what else cannot be
    averaged.
    """
    if budget >= tokens.count:
        return keep_all(tokens)
    device = tokens.features.device
    weights, centres = (upload(part, device) for part in _cells(budget, tokens.grid))
    finite = tokens.features.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    # One image at a time: a batched product may round differently.
    rows = torch.stack([weights @ image for image in finite])
    kept = keep_indices(tokens, centres.expand(tokens.batch, -1))
    return replace(kept, features=rows.to(tokens.features.dtype))


def split_into_bands(budget: int, height: int, width: int) -> tuple[int, ...]:
    """Cells of each horizontal band, top to bottom: K cells in all, about as high as wide."""
    bands = round((budget * height / width) ** 0.5)
    bands = max(-(-budget // width), min(bands, height, budget))
    return split_over_tiles(budget, bands)


@lru_cache(maxsize=64)
def _cells(budget: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Weights ``(K, N)`` of all tokens in each cell, and the token at its centre ``(K,)``."""
    weights, centres = [], []
    for tile, share in enumerate(split_over_tiles(budget, grid.tiles)):
        bands = split_into_bands(share, grid.height, grid.width) if share else ()
        vertical = _overlaps(len(bands), grid.height)
        for band, cells in enumerate(bands):
            row = int((band + 0.5) * grid.height / len(bands))
            horizontal = _overlaps(cells, grid.width)
            for cell in range(cells):
                column = int((cell + 0.5) * grid.width / cells)
                centres.append(tile * grid.per_tile + row * grid.width + column)
                whole = torch.zeros(grid.tokens, dtype=torch.float64)
                area = torch.outer(vertical[band], horizontal[cell]).flatten()
                whole[tile * grid.per_tile : (tile + 1) * grid.per_tile] = area
                weights.append(whole)
    return torch.stack(weights).float(), torch.tensor(centres)


def _overlaps(parts: int, length: int) -> Tensor:
    """Share of each of ``length`` units in each of equal ``parts``, ``(parts, length)``; sums 1."""
    edges = torch.arange(parts + 1, dtype=torch.float64) * length / max(parts, 1)
    units = torch.arange(length, dtype=torch.float64)
    upper = torch.minimum(edges[1:, None], units + 1)
    lower = torch.maximum(edges[:-1, None], units)
    return (upper - lower).clamp_min(0) * parts / length
