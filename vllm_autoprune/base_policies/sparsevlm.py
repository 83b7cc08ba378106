"""SparseVLM: keep the visual tokens with most attention from visually relevant text tokens.

Source: Zhang et al., "SparseVLM" (ICML 2025), and its published code, first version. It prunes
after layers 2, 6 and 15 to fixed counts (the paper's adaptive count is not in the code) and
recycles a share of the pruned tokens as cluster means. Here one stage keeps K tokens [ours].
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices, rank_descending
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.prefix import MOST_LAYERS, LanguagePrefix
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _SparseVLMParams(PolicyParams):
    """Parameters of SparseVLM."""

    layer: int = Field(
        2,
        ge=0,
        le=MOST_LAYERS,
        description="layer whose attention ranks, counted from 0; published: 2, then 6 and 15",
    )
    recycle: bool = Field(
        False,
        description="use up to half of K for cluster means of pruned tokens, as published",
    )


def _native(params: _SparseVLMParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """One stage: kept tokens in raster order, then cluster means, of the layer's output."""
    language = tokens.require_language()
    score = _rater_attention(language, params.layer, tokens.count)
    count = min(budget, tokens.count - 1)
    kept = rank_descending(score)[:, :count].sort(dim=1).values
    states = language.visual(language.states(params.layer), tokens.count, dim=1)
    # Recycled are pruned tokens, by descending score.
    rest = score.masked_fill(mask_from_indices(kept, tokens.count), -torch.inf)
    sources = rank_descending(rest)[:, : _recycled_count(tokens.count - count)]
    count = _cluster_count(sources.shape[1])
    members = density_peak_clusters(gather_rows(states, sources), count, break_ties=False)
    merged = _cluster_means(members, gather_rows(states, sources))
    none = kept.new_full((tokens.batch, merged.shape[1]), -1)
    rows = torch.cat([gather_rows(states, kept).float(), merged], dim=1)
    return PublishedSelection(tuple(torch.cat([kept, none], dim=1)), tuple(rows))


@base_policy(
    _SparseVLMParams,
    needs=frozenset({"language"}),
    native=_native,
    # Attention of a layer needs the layers before it, recycling the layer's own output.
    ranking_layers=lambda params, layers: params.layer + params.recycle,
)
def sparsevlm(params: _SparseVLMParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """The tokens with most attention from visually relevant text tokens, averaged over heads."""
    language = tokens.require_language()
    order = rank_descending(_rater_attention(language, params.layer, tokens.count))
    extra = 0
    if params.recycle:
        extra = min(_cluster_count(_recycled_count(tokens.count - budget)), budget // 2)
    picks = order[:, : budget - extra]
    if extra == 0:
        return ReferenceSelection(picks)
    # As published, clusters are computed from the layer's states; their means are of the rows that
    # enter the language model, because the mean becomes one of those rows.
    sources = order[:, picks.shape[1] :][:, : _recycled_count(tokens.count - picks.shape[1])]
    states = language.visual(language.states(params.layer), tokens.count, dim=1)
    members = density_peak_clusters(gather_rows(states, sources), extra)
    merged = _cluster_means(members, gather_rows(tokens.output, sources))
    return ReferenceSelection(picks, extra=merged.to(tokens.output.dtype))


def _rater_attention(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """Attention of the raters, averaged over heads and then raters, ``(B, N)`` float32.

    Raters are text tokens with above-average similarity to the visual tokens: the softmax over text
    tokens of dot products of input embeddings, averaged over visual tokens. If none is above the
    mean, as with a single token, all are raters [ours].
    """
    entering, text = language.embeddings().float(), language.text
    words = language.textual(entering, count, dim=1)
    dots = matmul_each(language.visual(entering, count, dim=1), words.transpose(1, 2))
    similarity = dots.masked_fill(~text[:, None, :], -torch.inf).softmax(dim=2).mean(dim=1)
    mean = similarity.sum(dim=1, keepdim=True) / text.sum(dim=1, keepdim=True)
    above = (similarity > mean) & text
    rate = torch.where(above.any(dim=1, keepdim=True), above, text).float()
    attention = language.visual(language.attention(layer).float().mean(dim=1), count)
    return matmul_each(rate[:, None, :], attention)[:, 0] / rate.sum(dim=1, keepdim=True)


def _cluster_means(members: Tensor, rows: Tensor) -> Tensor:
    """Mean row of each cluster ``(B, C, D)`` float32; ``members`` is a one-hot membership."""
    total = matmul_each(members.transpose(1, 2), rows.float())
    return total / (members.sum(dim=1) + 1e-6)[:, :, None]


def _recycled_count(pruned: int) -> int:
    """Number of recycled tokens among ``pruned`` ones."""
    return min(pruned, int(0.3 * pruned) + 1)


def _cluster_count(recycled: int) -> int:
    """Number of clusters into which ``recycled`` tokens are merged."""
    return int(recycled / 10) + 1


def density_peak_clusters(states: Tensor, count: int, *, break_ties: bool = True) -> Tensor:
    """Density-peak clustering (Du et al. 2016, DPC-KNN) of states ``(B, n, D)``.

    Returns one-hot membership ``(B, n, count)`` float32.

    Centres are the ``count`` tokens with the largest product of density and distance to the nearest
    denser token; every token belongs to its nearest centre. The published code adds random noise
    of 1e-6 to the density to break ties. Here the lower index counts as denser [ours], or ties stay
    unbroken, as in the golden cases, which were recorded without noise.
    """
    states = states.float()
    distance = torch.stack([torch.cdist(image, image) for image in states]) / states.shape[2] ** 0.5
    near = distance.topk(min(count, distance.shape[2]), dim=2, largest=False).values
    density = (-near.square().mean(dim=2)).exp()
    denser = density[:, None, :] > density[:, :, None]
    if break_ties:
        place = torch.arange(states.shape[1], device=states.device)
        denser |= (density[:, None, :] == density[:, :, None]) & (place < place[:, None])
    farthest = distance.flatten(1).amax(dim=1)[:, None, None]
    apart = torch.where(denser, distance, farthest).amin(dim=2)
    chosen = (apart * density).argsort(dim=1, descending=True, stable=True)[:, :count]
    towards = distance.gather(1, chosen[:, :, None].expand(-1, -1, distance.shape[2]))
    nearest = towards.argmin(dim=1)
    members = torch.zeros(*nearest.shape, count, device=states.device)
    return members.scatter_(2, nearest[:, :, None], 1.0)
