"""HoloV: the most attended tokens of each band of the image, with quotas by attention.

Source: HoloV (NeurIPS 2025, arXiv 2510.02912) and its published code. The code also adds the
variance of similarities to a band's weight, scaled so that every band gets the same share of its
attention: quotas are those of attention alone, so features are not read [ours].
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_groups, tile_groups

_SCALE = 1090.0
"""Published factor of a band's mean attention: 1000, and 0.09 of that for the variance."""

_OFFSET = 1e-6
"""Added to the sum of weights that is divided by, as published."""


class _HoloVParams(PolicyParams):
    """Parameters of HoloV."""

    bands: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="bands of a tile; null: 1024 / K at 576 tokens, as published",
    )

    def count(self, tokens: int, budget: int) -> int:
        """Bands of a tile of ``tokens`` tokens of which ``budget`` are kept."""
        wanted = 1024 * tokens // (576 * budget) if self.bands is None else self.bands
        return max(1, min(wanted, tokens))


def _native(params: _HoloVParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """Tokens band by band, by descending attention within a band."""
    share = budget // tokens.grid.tiles
    attention = tokens.by_tile(tokens.require_cls_attention().float())
    picks = _select_by_band(attention, share, params.count(attention.shape[1], share))
    tile = torch.arange(tokens.grid.tiles, device=picks.device).repeat(tokens.batch)
    within = picks + tile[:, None] * tokens.grid.per_tile
    return PublishedSelection(tuple(within.reshape(tokens.batch, -1)))


@base_policy(_HoloVParams, needs=frozenset({"cls_attention"}), native=_native)
def holov(params: _HoloVParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """The most attended tokens of every band of rows, with quotas by the band's attention."""
    attention = tokens.require_cls_attention().float()
    groups, picks = tile_groups(tokens, budget), []
    for group in groups:
        scores = group.of(attention, tokens)
        banded = _select_by_band(scores, group.share, params.count(scores.shape[1], group.share))
        order = rank_descending(scores.gather(1, banded))
        picks.append(group.within_image(banded.gather(1, order), tokens))
    return ReferenceSelection(join_groups(picks, groups, tokens))


def _select_by_band(attention: Tensor, count: int, bands: int) -> Tensor:
    """Picks ``(R, count)`` of attention ``(R, n)``: band by band, by descending attention.

    Bands are runs of n // P tokens, the first n mod P one token longer, with quotas by their mean
    attention. What a band has no room for goes one by one to the band with room whose fair share is
    farthest above what it has [ours]: the published code pads with zero rows there.
    """
    rows, size = attention.shape
    place = torch.arange(size, device=attention.device)
    long, short = size % bands, size // bands
    edge = long * (short + 1)
    after = long + (place - edge) // max(short, 1)
    band = torch.where(place < edge, place // (short + 1), after)
    turn = torch.arange(bands, device=attention.device)
    member = band[:, None] == turn
    sizes = member.sum(dim=0)

    # Tokens (R, P) that each band gets.
    finite = attention.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0)
    total = torch.stack([row @ member.to(row.dtype) for row in finite])
    weight = _SCALE * total / sizes.clamp_min(1)
    fair = count * weight / weight.sum(dim=1, keepdim=True)
    take = (count * weight / (weight.sum(dim=1, keepdim=True) + _OFFSET)).floor().to(torch.int64)
    remainder = count - take.sum(dim=1, keepdim=True)
    by_weight = torch.zeros_like(take).scatter_(1, rank_descending(weight), turn.expand(rows, -1))
    take = torch.minimum(take + (by_weight < remainder), sizes)
    for _ in range(count):
        missing = count - take.sum(dim=1, keepdim=True)
        lacking = (fair.nan_to_num() - take).masked_fill(take >= sizes, -torch.inf)
        best = lacking.argmax(dim=1, keepdim=True)
        take = take.scatter_add(1, best, (missing > 0).to(take.dtype))

    # The most attended of each.
    order = rank_descending(attention)
    order = order.gather(1, band[order].argsort(dim=1, stable=True))
    owner = band[order]
    rank = place - (sizes.cumsum(0) - sizes)[owner]
    chosen = rank < take.gather(1, owner)
    places = torch.sort(chosen.to(torch.uint8), dim=1, descending=True, stable=True).indices
    return order.gather(1, places[:, :count])
