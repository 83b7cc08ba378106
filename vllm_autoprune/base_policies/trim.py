"""TRIM: keep the patches that CLIP finds nearest to the text, and the mean of all others.

Knows nothing about where patches and text are embedded: CLIP or the language model's embeddings.

Source: Song et al., "Less is More: A Simple yet Effective Token Reduction Method" (COLING 2025),
and its published code, which takes minus the dot product where the paper says cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.base_policies.merging import (
    TileRows,
    merge_by_tile,
    native_by_tile,
    products,
)
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.base_policy import BasePolicyParams, Native, Reference, base_policy
from vllm_autoprune.tpdsl.numerics import mask_of, ranked
from vllm_autoprune.tpdsl.outliers import outliers
from vllm_autoprune.tpdsl.tiles import TileGroup
from vllm_autoprune.tpdsl.tokens import VisualTokens


class TrimParams(BasePolicyParams):
    """TRIM has no parameters: everything is as published."""


def native(params: TrimParams, tokens: VisualTokens, budget: int | None) -> Native:
    """Of each tile the kept patches in raster order, then the mean of all others.

    Without a budget as many patches as are outliers of the score, counted over all tiles; with
    one K rows, the mean among them.
    """
    score = tokens.by_tile(score_of(tokens))
    patches = tokens.by_tile(tokens.require_tower().patches)
    tiles, size = tokens.grid.tiles, tokens.grid.per_tile

    def run(tile: int) -> tuple[Tensor, Tensor]:
        if budget is None:
            image = slice(tile // tiles * tiles, (tile // tiles + 1) * tiles)
            pooled = score[image].softmax(dim=-1).flatten()
            count = int(size * (int(outliers(pooled[None]).sum()) / pooled.shape[0]))
        else:
            count = budget // tiles - 1
        if count < 1:
            raise SelectionError("TRIM's published code fails where it keeps no patch: keep more")
        kept = ranked(score[tile])[:count].sort().values
        rows, mean = patches[tile, kept], _mean_of_others(patches[tile][None], kept[None])[0]
        return torch.cat([kept, kept.new_full((1,), -1)]), torch.cat([rows, mean])

    return native_by_tile(tokens, run)


@base_policy(TrimParams, needs=frozenset({"instruction", "tower"}), native=native)
def trim(params: TrimParams, tokens: VisualTokens, budget: int) -> Reference:
    """The K - 1 patches nearest to the instruction, and one row, the mean of all others."""
    score = score_of(tokens)

    def run(group: TileGroup) -> TileRows:
        # A single row stays a patch: the mean of everything says little.
        count = max(1, group.share - 1)
        picks = ranked(group.of(score, tokens))[:, :count]
        patches = group.of(tokens.require_tower().patches, tokens)
        mean = _mean_of_others(patches, picks)
        return TileRows(picks, patches[:, :0], mean[:, : group.share - count])

    return merge_by_tile(tokens, budget, run)


def score_of(tokens: VisualTokens) -> Tensor:
    """``(B, N)`` float32: dot product with the text, in the direction that means relevance.

    Neither side is normalised, as published. Several text segments count as their mean [ours]:
    the published code cuts the text off after the first.
    """
    given = tokens.require_instruction()
    used = given.segments[:, :, None]
    total = torch.where(used, given.text.float(), 0.0).sum(dim=1, keepdim=True)
    text = total / used.sum(dim=1, keepdim=True).clamp_min(1)
    dots = products(given.patches.float(), text.transpose(1, 2))[:, :, 0]
    return given.sign * dots


def _mean_of_others(patches: Tensor, picks: Tensor) -> Tensor:
    """``(R, 1, Dv)`` float32: mean of the rows that are not picked, zero where none are."""
    size = patches.shape[1]
    dropped = (~mask_of(picks, size)).float()[:, None, :]
    return products(dropped, patches.float()) / max(1, size - picks.shape[1])
