"""TRIM: keep the patches most similar to the text in CLIP, and the mean of all others.

Source: Song et al., "Less is More: A Simple yet Effective Token Reduction Method" (COLING 2025),
and its published code, which takes minus the dot product where the paper says cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.base_policies.tile_merging import TileRows, merge_by_tile, native_by_tile
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import find_outliers, mask_from_indices, rank_descending
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import TileGroup, VisualTokens


class _TrimParams(PolicyParams):
    """TRIM has no parameters."""


def _native(params: _TrimParams, tokens: VisualTokens, budget: int | None) -> PublishedSelection:
    """Per tile, the kept patches in raster order, then the mean of all others.

    Without a budget, as many patches as the score has outliers, counted over all tiles; with a
    budget, K rows including the mean.
    """
    score = tokens.by_tile(_text_similarity(tokens))
    patches = tokens.by_tile(tokens.require_tower().patches)
    tiles, size = tokens.grid.tiles, tokens.grid.per_tile

    def run(tile: int) -> tuple[Tensor, Tensor]:
        if budget is None:
            image = slice(tile // tiles * tiles, (tile // tiles + 1) * tiles)
            pooled = score[image].softmax(dim=-1).flatten()
            count = int(size * (int(find_outliers(pooled[None]).sum()) / pooled.shape[0]))
        else:
            count = budget // tiles - 1
        if count < 1:
            raise SelectionError("TRIM's published code fails where it keeps no patch: keep more")
        kept = rank_descending(score[tile])[:count].sort().values
        rows, mean = patches[tile, kept], _mean_of_others(patches[tile][None], kept[None])[0]
        return torch.cat([kept, kept.new_full((1,), -1)]), torch.cat([rows, mean])

    return native_by_tile(tokens, run)


@base_policy(_TrimParams, needs=frozenset({"instruction", "tower"}), own_count=_native)
def trim(params: _TrimParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """The K - 1 patches most similar to the instruction, and the mean of all others."""
    score = _text_similarity(tokens)

    def run(group: TileGroup) -> TileRows:
        # With a single row, keep a patch rather than the mean of all.
        count = max(1, group.share - 1)
        picks = rank_descending(group.of(score, tokens))[:, :count]
        patches = group.of(tokens.require_tower().patches, tokens)
        mean = _mean_of_others(patches, picks)
        return TileRows(picks, patches[:, :0], mean[:, : group.share - count])

    return merge_by_tile(tokens, budget, run)


def _text_similarity(tokens: VisualTokens) -> Tensor:
    """Signed dot product of each token with the text, ``(B, N)`` float32.

    Neither side is normalised, as published. Several text segments are represented by their mean
    [ours]: the published code truncates the text after the first.
    """
    instruction = tokens.require_instruction()
    used = instruction.segments[:, :, None]
    total = torch.where(used, instruction.text.float(), 0.0).sum(dim=1, keepdim=True)
    text = total / used.sum(dim=1, keepdim=True).clamp_min(1)
    dots = matmul_each(instruction.patches.float(), text.transpose(1, 2))[:, :, 0]
    return instruction.sign * dots


def _mean_of_others(patches: Tensor, picks: Tensor) -> Tensor:
    """Mean of the rows that are not picked ``(R, 1, Dv)`` float32; zero if there are none."""
    size = patches.shape[1]
    dropped = (~mask_from_indices(picks, size)).float()[:, None, :]
    return matmul_each(dropped, patches.float()) / max(1, size - picks.shape[1])
