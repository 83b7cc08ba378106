"""Base policies that divide an image into groups of tokens and keep some of each."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.merging import TileRows, merge_by_tile
from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.ops.similarity import cosines, matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import Need, TileGroup, VisualTokens

_BAND_SCALE = 1090.0
"""Published factor of a band's mean attention: 1000, plus 0.09 times that for the variance."""

_BAND_OFFSET = 1e-6
"""Added to the sum of weights before division, as published."""


class _HoloVParams(PolicyParams):
    """Parameters of HoloV."""

    bands: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="bands of a tile; null: 1024 / K at 576 tokens, as published",
    )

    def count(self, tokens: int, budget: int) -> int:
        """Number of bands of a tile of ``tokens`` tokens, of which ``budget`` are kept."""
        wanted = 1024 * tokens // (576 * budget) if self.bands is None else self.bands
        return max(1, min(wanted, tokens))


@base_policy(_HoloVParams, needs=frozenset({"cls_attention"}), cost=8.8)
def _holov(
    params: _HoloVParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """The most attended tokens of every band of rows, with quotas by the band's attention.

    Source: HoloV (NeurIPS 2025, arXiv 2510.02912) and its published code. The code also adds the
    variance of similarities to a band's weight, scaled so that every band gets the same share of
    its attention: quotas are those of attention alone, so features are not read [ours].
    """
    attention = tokens.require_cls_attention().float()
    groups = TileGroup.split(tokens, budget)
    picks = []
    for group in groups:
        scores = group.of(attention, tokens)
        bands = params.count(scores.shape[1], group.share)
        picks.append(
            group.within_image(_select_by_band(scores, group.share, bands), tokens)
        )
    return ReferenceSelection(TileGroup.join(picks, groups, tokens))


def _select_by_band(attention: Tensor, count: int, bands: int) -> Tensor:
    """Picks ``(R, count)`` of the most attended tokens of each band, by attention ``(R, n)``.

    Each of G bands is a run of n // G tokens, the first n mod G bands having one token more. Quotas
    are by the mean attention of a band. Tokens that a band has no room for go one by one to the
    band with room that is farthest below its fair share [ours]: the published code pads with zero
    rows there.
    """
    rows, size = attention.shape
    position = torch.arange(size, device=attention.device)
    long_bands = size % bands
    short_size = size // bands
    edge = long_bands * (short_size + 1)
    after = long_bands + (position - edge) // max(short_size, 1)
    band = torch.where(position < edge, position // (short_size + 1), after)
    numbers = torch.arange(bands, device=attention.device)
    member = band[:, None] == numbers
    sizes = member.sum(dim=0)

    # `take` is the quota (R, G) of tokens of each band.
    finite = attention.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0)
    total = torch.stack([row @ member.to(row.dtype) for row in finite])
    weight = _BAND_SCALE * total / sizes.clamp_min(1)
    fair = count * weight / weight.sum(dim=1, keepdim=True)
    take = (
        (count * weight / (weight.sum(dim=1, keepdim=True) + _BAND_OFFSET))
        .floor()
        .to(torch.int64)
    )
    remainder = count - take.sum(dim=1, keepdim=True)
    by_weight = torch.zeros_like(take).scatter_(
        1, rank_descending(weight), numbers.expand(rows, -1)
    )
    take = torch.minimum(take + (by_weight < remainder), sizes)
    for _ in range(count):
        missing = count - take.sum(dim=1, keepdim=True)
        lacking = (fair.nan_to_num() - take).masked_fill(take >= sizes, -torch.inf)
        farthest_below = lacking.argmax(dim=1, keepdim=True)
        take = take.scatter_add(1, farthest_below, (missing > 0).to(take.dtype))

    # The most attended tokens of each band.
    order = rank_descending(attention)
    by_band = order.gather(1, band[order].argsort(dim=1, stable=True))
    owner = band[by_band]
    rank = position - (sizes.cumsum(0) - sizes)[owner]
    chosen = torch.zeros_like(by_band, dtype=torch.bool)
    chosen.scatter_(1, by_band, rank < take.gather(1, owner))
    chosen_first = rank_descending(chosen.gather(1, order).to(torch.uint8))
    return order.gather(1, chosen_first[:, :count])


_Mode = Literal["patch", "cls", "qwen"]

_MODE_NEEDS: dict[_Mode, tuple[Need, ...]] = {
    "patch": ("cls_attention", "encoder"),
    "cls": ("cls_attention", "encoder", "tower"),
    "qwen": (),
}


class _PruneSIDParams(PolicyParams):
    """Parameters of PruneSID."""

    groups: int | None = Field(
        None,
        ge=1,
        le=256,
        description="groups per tile; null: a quarter of its tokens, K / 4",
    )
    threshold: float | None = Field(
        None,
        ge=0.0,
        le=100.0,
        description="similarity, in multiples of the mean, above which a token repeats a more "
        "attended one of its group; null: K / 32, as published",
    )
    mode: _Mode = Field(
        "patch",
        description="cls: one row is [CLS], as published; patch: K patches; qwen: projected tokens "
        "scored by their group's direction, as published for Qwen2-VL, without attention",
    )


@base_policy(
    _PruneSIDParams,
    needs=frozenset({"cls_attention", "encoder", "tower"}),
    reads=lambda params: frozenset(_MODE_NEEDS[params.mode]),
    cost=83.6,
)
def _prunesid(
    params: _PruneSIDParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """The most attended tokens of every principal direction that repeat no better one.

    Source: PruneSID (ICLR 2026, arXiv 2603.09480) and its published code, whose decomposition is
    randomised and not seeded: here it is exact [ours].
    """

    def run(group: TileGroup) -> TileRows:
        extra = group.cls_rows(tokens)
        # With a single row, keep a patch: the row of [CLS] alone would leave no token.
        extra = extra if group.share > 1 else extra[:, :0]
        picks = _pick_by_group(params, tokens, group, group.share - extra.shape[1])
        return TileRows(picks, extra[:, :0], extra)

    if params.mode == "cls":
        return merge_by_tile(tokens, budget, run)
    groups = TileGroup.split(tokens, budget)
    picks = [
        group.within_image(_pick_by_group(params, tokens, group, group.share), tokens)
        for group in groups
    ]
    return ReferenceSelection(TileGroup.join(picks, groups, tokens))


def _pick_by_group(
    params: _PruneSIDParams, tokens: VisualTokens, tiles: TileGroup, count: int
) -> Tensor:
    """Picks ``(R, count)`` in turn: the best token of every group by score, then the second, ...

    With a row of [CLS], ``count`` is one less than the tiles' share, by which the published rules
    count. Earlier picks mean higher confidence, as consumers of a reference selection expect.
    """
    qwen = params.mode == "qwen"
    budget = tiles.share
    rows = tiles.of(tokens.features if qwen else tokens.require_encoder(), tokens)
    size = rows.shape[1]
    wanted = (
        max(budget // 4, 4 if qwen else 1) if params.groups is None else params.groups
    )
    # Absolute top left singular vectors (R, n, q) of sigmoid(rows), each row less its mean. They
    # are exact and in float64, because groups are decided by small differences. Rows that are not
    # finite count as 0, because decomposing them would raise.
    squashed = torch.sigmoid(rows.double().nan_to_num())
    centred = squashed - squashed.mean(dim=2, keepdim=True)
    _, vectors = torch.linalg.eigh(matmul_each(centred, centred.transpose(1, 2)))
    loadings = vectors[:, :, -min(wanted, size) :].flip(2).abs()
    group = loadings.argmax(dim=2)
    if qwen:
        score = loadings.gather(2, group[:, :, None])[:, :, 0]
    else:
        score = tiles.of(tokens.require_cls_attention().float(), tokens)
    similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
    # Similarity from which on a token repeats another, as a multiple of the mean over all pairs.
    total = torch.stack(
        [matrix.sum() - matrix.diagonal().sum() for matrix in similarity]
    )
    threshold = params.threshold
    mean = total[:, None] / max(1, size * (size - 1))
    if threshold is None:
        threshold = max(18 * budget / size, 1.0) if qwen else budget / 32
    if qwen:  # the published mean sums pairs and the diagonal, and divides by n squared
        diagonals = torch.stack([matrix.diagonal().sum() for matrix in similarity])[
            :, None
        ]
        mean = (mean * (size * (size - 1)) / 2 + diagonals) / size**2
    bound = threshold * mean
    best = rank_descending(score)
    distinct = _find_distinct(similarity, best, group, bound)
    sizes = _count_members(group, loadings.shape[2])
    take = _group_quotas(
        sizes, _count_members(group, loadings.shape[2], distinct), budget, count
    )

    order = best.gather(
        1, (~distinct).gather(1, best).to(torch.uint8).argsort(dim=1, stable=True)
    )
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    begins = (sizes.cumsum(dim=1) - sizes).gather(1, group.gather(1, order))
    places = torch.arange(size, device=order.device) - begins
    rank = torch.zeros_like(places).scatter_(1, order, places)
    dropped = rank >= take.gather(1, group)
    turn = rank.masked_fill(dropped, size).gather(1, best)
    return best.gather(1, turn.argsort(dim=1, stable=True)[:, :count])


def _find_distinct(
    similarity: Tensor, order: Tensor, group: Tensor, bound: Tensor
) -> Tensor:
    """Non-maximum suppression within groups: the tokens ``(R, n)`` bool that remain.

    They are at most ``bound`` similar to every better token of their group that remains. Inputs:
    similarity ``(R, n, n)``, order ``(R, n)`` token indices from best to worst, group ``(R, n)``,
    bound ``(R, 1)``. It takes one step per token, because a suppressed token suppresses no other.
    """
    size = order.shape[1]
    rows = similarity.gather(1, order[:, :, None].expand(-1, -1, size))
    ordered = rows.gather(2, order[:, None, :].expand(-1, size, -1))
    owner = group.gather(1, order)
    drops = (ordered > bound[:, :, None]) & (owner[:, :, None] == owner[:, None, :])
    drops = drops.triu(1)
    distinct = torch.ones_like(owner, dtype=torch.bool)
    for rank in range(size - 1):
        distinct &= ~(drops[:, rank] & distinct[:, rank, None])
    return torch.zeros_like(distinct).scatter_(1, order, distinct)


def _count_members(group: Tensor, groups: int, counted: Tensor | None = None) -> Tensor:
    """Number of tokens in each group ``(R, q)``, or of those in the mask ``counted`` ``(R, n)``."""
    ones = torch.ones_like(group) if counted is None else counted.to(group.dtype)
    return torch.zeros_like(group[:, :1]).expand(-1, groups).scatter_add(1, group, ones)


def _group_quotas(members: Tensor, distinct: Tensor, budget: int, total: int) -> Tensor:
    """Number of tokens ``(R, q)`` to pick from each group, ``total`` in all.

    members and distinct ``(R, q)`` count all and the distinct members of each group. ``budget`` is
    that of the method's rules, which may count a row of [CLS] besides the ``total`` tokens.
    """
    minimum = members.clamp_max(1)
    maximum = torch.minimum(members, distinct).clamp_max(5 * math.ceil(budget / 64))
    # Every bound is raised by the same number until the bounds sum to the budget, if they can.
    steps = torch.arange(budget + 1, device=maximum.device)[:, None]
    raised = torch.minimum(maximum[:, None] + steps, members[:, None])
    short = (raised.sum(dim=2) < budget).sum(dim=1).clamp_max(budget)
    maximum = raised.gather(1, short[:, None, None].expand(-1, 1, members.shape[1]))[
        :, 0
    ]
    extra = total - minimum.sum(dim=1, keepdim=True)
    share = distinct.float() / distinct.sum(dim=1, keepdim=True).float()
    ends = (share.cumsum(dim=1) * extra).round().to(torch.int64)
    take = torch.minimum(
        ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])) + minimum, maximum
    )
    # Tokens that a group has no room for go to the groups with most distinct members.
    largest = rank_descending(distinct)
    room = (maximum - take).gather(1, largest)
    missing = total - take.sum(dim=1, keepdim=True)
    added = torch.minimum((missing - (room.cumsum(dim=1) - room)).clamp_min(0), room)
    return take.scatter_add(1, largest, added)
