"""PruMerge+: keep outliers of [CLS] attention and spaced samples, with their neighbours merged in.

Source: Shang et al., "LLaVA-PruMerge" (ICCV 2025), and its published code, which adds an
unnormalised sum of neighbours to each kept token where the paper averages. The published number of
tokens depends on the image; for a given K, ``native`` follows EffiVLM-Bench, and the base policy
uses a rule of this project [ours] with exactly K rows.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.tile_merging import TileRows, merge_by_tile, native_by_tile
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import (
    find_outliers,
    gather_rows,
    mask_from_indices,
    rank_descending,
)
from vllm_autoprune.ops.similarity import cosines_with, matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import TileGroup, VisualTokens

NEIGHBOURS = 32
"""Number of most similar tokens that are merged into a kept one."""


class _PruMergePlusParams(PolicyParams):
    """Parameters of PruMerge+."""

    plus: bool = Field(
        True, description="false: PruMerge, which keeps tokens by attention alone, without samples"
    )
    drop_extra: bool = Field(
        False, description="keep one more token instead of the sum of the dropped ones"
    )


def _native(
    params: _PruMergePlusParams, tokens: VisualTokens, budget: int | None
) -> PublishedSelection:
    """Outliers by descending attention, then samples, then the sum of the dropped tokens.

    Without a budget, the published number of tokens; with a budget, K tokens and K + 1 rows as in
    EffiVLM-Bench, which takes samples from the top of the image first.
    """
    following = tokens.require_next_layer()
    attention = tokens.by_tile(following.attention)
    keys = tokens.by_tile(following.keys)
    patches = tokens.by_tile(tokens.require_tower().patches)
    share = None if budget is None else budget // tokens.grid.tiles

    def run(tile: int) -> tuple[Tensor, Tensor]:
        size = attention.shape[1]
        outliers = int(find_outliers(attention[tile][None]).sum()) / size
        best = rank_descending(attention[tile])
        if share is not None:  # the rule of EffiVLM-Bench
            top = best[: min(share, max(1, int(size * outliers)))]
            samples = torch.arange(0, size, size // share, device=best.device)
            free = samples[~torch.isin(samples, top)]
            kept = torch.cat([top, free[: share - top.shape[0]]])
        else:  # the published rule, about 4 per outlier
            kept = best[: int(size * outliers)]
            stride = int(int(1 / outliers) / 3) if outliers else 0
            if params.plus and stride == 0:
                raise SelectionError(
                    f"PruMerge+ cannot choose its own count: {outliers:.0%} of the tokens are "
                    "outliers, for which the published rule divides by zero; give a budget K"
                )
            if params.plus:
                # The published range stops one early, so the last token is never sampled.
                samples = torch.arange(0, size - 1, stride, device=best.device)
                kept = torch.cat([kept, samples[~torch.isin(samples, kept)]])
        row = slice(tile, tile + 1)
        merged, extra = _merged(attention[row], keys[row], patches[row], kept[None])
        return torch.cat([kept, kept.new_full((1,), -1)]), torch.cat([merged[0], extra[0]])

    return native_by_tile(tokens, run)


@base_policy(_PruMergePlusParams, needs=frozenset({"tower", "next_layer"}), own_count=_native)
def prumerge_plus(
    params: _PruMergePlusParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Outliers of [CLS] attention, then evenly spaced tokens, with neighbours merged in."""
    following = tokens.require_next_layer()

    def run(group: TileGroup) -> TileRows:
        attention = group.of(following.attention, tokens)
        # With a single row, keep a token: there has to be one to merge into.
        alone = params.drop_extra or group.share == 1
        count = group.share if alone else group.share - 1
        picks = _spread(attention, count) if params.plus else rank_descending(attention)[:, :count]
        patches = group.of(tokens.require_tower().patches, tokens)
        merged, extra = _merged(attention, group.of(following.keys, tokens), patches, picks)
        return TileRows(picks, merged, extra[:, :0] if alone else extra)

    return merge_by_tile(tokens, budget, run)


def _spread(attention: Tensor, count: int) -> Tensor:
    """Picks ``(R, count)``: outliers by attention ``(R, n)``, then evenly spaced others [ours].

    Shapes do not depend on the number of outliers, so this does not synchronise with the device.
    """
    size = attention.shape[1]
    order = rank_descending(attention)
    above = find_outliers(attention).sum(dim=1, keepdim=True).clamp_max(count)
    turn = torch.arange(count, device=attention.device)
    positions = torch.arange(size, device=attention.device)
    outlying = torch.zeros_like(order, dtype=torch.bool)
    outlying.scatter_(1, order, (positions < above).expand_as(order))
    others = torch.sort(outlying.to(torch.uint8), dim=1, stable=True).indices
    remaining, samples = size - above, count - above
    step = ((turn - above).clamp_min(0) * 2 + 1) * remaining // (2 * samples.clamp_min(1))
    sampled = others.gather(1, step.clamp_max(size - 1))
    return torch.where(turn < above, order[:, :count], sampled)


def _merged(
    attention: Tensor, keys: Tensor, patches: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """Merged rows ``(R, P, Dv)`` of the picks and sum ``(R, 1, Dv)`` of dropped rows, float32.

    Row i is x_i + sum of a_j x_j over the unmerged neighbours j of i, kept or not.
    """
    size = attention.shape[1]
    similarity = cosines_with(gather_rows(keys, picks), keys)
    similarity = similarity.scatter(2, picks[:, :, None], -torch.inf)
    near = rank_descending(similarity)[:, :, : min(NEIGHBOURS, size - 1)]
    weight = attention.float()[:, None, :]
    inward = torch.zeros_like(similarity)
    inward.scatter_(2, near, weight.expand_as(similarity).gather(2, near))
    dropped = weight.masked_fill(mask_from_indices(picks, size)[:, None, :], 0.0)
    rows = patches.float()
    sums = matmul_each(torch.cat([inward, dropped], dim=1), rows)
    return gather_rows(rows, picks) + sums[:, :-1], sums[:, -1:]
