"""PruMerge+: keep outliers of [CLS] attention and samples between them, and merge neighbours in.

Knows nothing about the instruction: one image keeps the same rows for every question.

Source: Shang et al., "LLaVA-PruMerge" (ICCV 2025), and its published code, which adds an
unnormalised sum of neighbours to each kept token where the paper averages. Its count follows the
image; the rule for a given count is that of EffiVLM-Bench (native) or ours (exactly K rows).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.merging import (
    TileRows,
    merge_by_tile,
    native_by_tile,
    products,
)
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.products import cosines_with
from vllm_autoprune.tpdsl.base_policy import BasePolicyParams, Native, Reference, base_policy
from vllm_autoprune.tpdsl.numerics import mask_of, ranked
from vllm_autoprune.tpdsl.outliers import outliers
from vllm_autoprune.tpdsl.reassembly import gather_rows
from vllm_autoprune.tpdsl.tiles import TileGroup
from vllm_autoprune.tpdsl.tokens import VisualTokens

NEIGHBOURS = 32
"""Most similar tokens that are merged into a kept one."""


class PruMergePlusParams(BasePolicyParams):
    """Parameters of PruMerge+."""

    plus: bool = Field(
        True, description="false: PruMerge, which keeps by attention alone and samples nothing"
    )
    drop_extra: bool = Field(
        False, description="keep one more token in place of the row that sums what is dropped"
    )


def native(params: PruMergePlusParams, tokens: VisualTokens, budget: int | None) -> Native:
    """Kept tokens, outliers by attention first, then samples, then the row of what is dropped.

    Without a budget as many as the published rule finds; with one K of them, and K + 1 rows, as
    EffiVLM-Bench does: samples come from the top of the image first.
    """
    following = tokens.require_next_layer()
    attention = tokens.by_tile(following.attention)
    keys = tokens.by_tile(following.keys)
    patches = tokens.by_tile(tokens.require_tower().patches)
    share = None if budget is None else budget // tokens.grid.tiles

    def run(tile: int) -> tuple[Tensor, Tensor]:
        a = attention[tile]
        kept = _own_count(a, plus=params.plus) if share is None else _given_count(a, share)
        one = slice(tile, tile + 1)
        merged, extra = _merged(attention[one], keys[one], patches[one], kept[None])
        return torch.cat([kept, kept.new_full((1,), -1)]), torch.cat([merged[0], extra[0]])

    return native_by_tile(tokens, run)


@base_policy(PruMergePlusParams, needs=frozenset({"tower", "next_layer"}), native=native)
def prumerge_plus(params: PruMergePlusParams, tokens: VisualTokens, budget: int) -> Reference:
    """Outliers of [CLS] attention, then an even spread, each with its neighbours merged in."""
    following = tokens.require_next_layer()

    def run(group: TileGroup) -> TileRows:
        attention = group.of(following.attention, tokens)
        # A single row stays a token: without one there would be nothing to merge into.
        alone = params.drop_extra or group.share == 1
        count = group.share if alone else group.share - 1
        picks = _spread(attention, count) if params.plus else ranked(attention)[:, :count]
        patches = group.of(tokens.require_tower().patches, tokens)
        merged, extra = _merged(attention, group.of(following.keys, tokens), patches, picks)
        return TileRows(picks, merged, extra[:, :0] if alone else extra)

    return merge_by_tile(tokens, budget, run)


def _spread(attention: Tensor, count: int) -> Tensor:
    """``(R, n) -> (R, count)``: outliers by attention, then even steps through the others [ours].

    However many outliers a tile has, shapes stay the same, so nothing waits for the device.
    """
    size = attention.shape[1]
    order = ranked(attention)
    above = outliers(attention).sum(dim=1, keepdim=True).clamp_max(count)
    turn = torch.arange(count, device=attention.device)
    places = torch.arange(size, device=attention.device)
    first = torch.zeros_like(order, dtype=torch.bool)
    first.scatter_(1, order, (places < above).expand_as(order))
    others = torch.sort(first.to(torch.uint8), dim=1, stable=True).indices
    left, samples = size - above, count - above
    step = ((turn - above).clamp_min(0) * 2 + 1) * left // (2 * samples.clamp_min(1))
    sampled = others.gather(1, step.clamp_max(size - 1))
    return torch.where(turn < above, order[:, :count], sampled)


def _own_count(attention: Tensor, *, plus: bool) -> Tensor:
    """``(n,) -> (kept,)``: the published rule, about four times as many as there are outliers."""
    size = attention.shape[0]
    share = _outlier_share(attention)
    top = ranked(attention)[: int(size * share)]
    if not plus:
        return top
    stride = int(int(1 / share) / 3) if share else 0
    if stride == 0:
        raise SelectionError(
            f"PruMerge+ has no count of its own here: {share:.0%} of the tokens are outliers, for "
            "which the published rule divides by zero; give a budget K"
        )
    # The published range ends one short, so the last token is never sampled.
    samples = torch.arange(0, size - 1, stride, device=attention.device)
    return torch.cat([top, samples[~torch.isin(samples, top)]])


def _given_count(attention: Tensor, count: int) -> Tensor:
    """``(n,) -> (count,)``: EffiVLM-Bench's rule."""
    size = attention.shape[0]
    top = ranked(attention)[: min(count, max(1, int(size * _outlier_share(attention))))]
    samples = torch.arange(0, size, size // count, device=attention.device)
    free = samples[~torch.isin(samples, top)]
    return torch.cat([top, free[: count - top.shape[0]]])


def _outlier_share(attention: Tensor) -> float:
    return int(outliers(attention[None]).sum()) / attention.shape[0]


def _merged(
    attention: Tensor, keys: Tensor, patches: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows ``(R, P, Dv)`` of the picks and ``(R, 1, Dv)`` of what is dropped, float32.

    x_i + sum of a_j x_j over the neighbours of i, kept or not, all of them as they were.
    """
    size = attention.shape[1]
    likeness = cosines_with(gather_rows(keys, picks), keys)
    likeness = likeness.scatter(2, picks[:, :, None], -torch.inf)
    near = ranked(likeness)[:, :, : min(NEIGHBOURS, size - 1)]
    weight = attention.float()[:, None, :]
    inward = torch.zeros_like(likeness)
    inward.scatter_(2, near, weight.expand_as(likeness).gather(2, near))
    dropped = weight.masked_fill(mask_of(picks, size)[:, None, :], 0.0)
    rows = patches.float()
    sums = products(torch.cat([inward, dropped], dim=1), rows)
    return gather_rows(rows, picks) + sums[:, :-1], sums[:, -1:]
