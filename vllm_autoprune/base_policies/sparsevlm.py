"""SparseVLM: keep the visual tokens with most attention from visually relevant text tokens.

Source: Zhang et al., "SparseVLM" (ICML 2025), and its published code, first version. It prunes
after layers 2, 6 and 15 to fixed counts (the paper's adaptive count is not in the code) and
recycles a share of the pruned tokens as cluster means. Here one stage keeps K tokens [ours].
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.attended import (
    MOST_LAYERS,
    checked_layer,
    text_span,
    visual_span,
)
from vllm_autoprune.base_policies.merging import products
from vllm_autoprune.base_policies.recycling import cluster_count, clusters, recycled_count
from vllm_autoprune.tpdsl.base_policy import (
    BasePolicyParams,
    Native,
    Reference,
    base_policy,
    counted,
)
from vllm_autoprune.tpdsl.language import LanguagePrefix
from vllm_autoprune.tpdsl.numerics import mask_of, ranked
from vllm_autoprune.tpdsl.reassembly import gather_rows
from vllm_autoprune.tpdsl.tokens import VisualTokens


class SparseVLMParams(BasePolicyParams):
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


def native(params: SparseVLMParams, tokens: VisualTokens, budget: int | None) -> Native:
    """One stage: kept tokens in raster order, then cluster means, of the layer's output."""
    language = tokens.require_language()
    score = relevance(language, params.layer, tokens.count)
    count = min(counted("sparsevlm", budget), tokens.count - 1)
    kept = ranked(score)[:, :count].sort(dim=1).values
    states = visual_span(language, language.states(params.layer), tokens.count, dim=1)
    sources = recycled(score, kept)
    count = cluster_count(sources.shape[1])
    members = clusters(gather_rows(states, sources), count, break_ties=False)
    merged = centres(members, gather_rows(states, sources))
    none = kept.new_full((tokens.batch, merged.shape[1]), -1)
    rows = torch.cat([gather_rows(states, kept).float(), merged], dim=1)
    return Native(tuple(torch.cat([kept, none], dim=1)), tuple(rows))


@base_policy(SparseVLMParams, needs=frozenset({"language"}), native=native)
def sparsevlm(params: SparseVLMParams, tokens: VisualTokens, budget: int) -> Reference:
    """The tokens with most attention from visually relevant text tokens, averaged over heads."""
    language = tokens.require_language()
    order = ranked(relevance(language, params.layer, tokens.count))
    extra = 0
    if params.recycle:
        extra = min(cluster_count(recycled_count(tokens.count - budget)), budget // 2)
    picks = order[:, : budget - extra]
    if extra == 0:
        return Reference(picks)
    # As published, clusters are computed from the layer's states; their means are of the rows that
    # enter the language model, because the mean becomes one of those rows.
    sources = order[:, picks.shape[1] :][:, : recycled_count(tokens.count - picks.shape[1])]
    states = visual_span(language, language.states(params.layer), tokens.count, dim=1)
    members = clusters(gather_rows(states, sources), extra)
    merged = centres(members, gather_rows(tokens.features, sources))
    return Reference(picks, extra=merged.to(tokens.features.dtype))


def raters(language: LanguagePrefix, count: int) -> Tensor:
    """Raters ``(B, Lt)`` bool: text tokens with above-average similarity to the visual tokens.

    Similarity is the softmax over text tokens of dot products of input embeddings, averaged over
    visual tokens. If none is above the mean, as with a single token, all are raters [ours].
    """
    entering, text = language.embeddings().float(), language.text
    visual = visual_span(language, entering, count, dim=1)
    words = text_span(language, entering, count, dim=1)
    dots = products(visual, words.transpose(1, 2))
    similarity = dots.masked_fill(~text[:, None, :], -torch.inf).softmax(dim=2).mean(dim=1)
    mean = similarity.sum(dim=1, keepdim=True) / text.sum(dim=1, keepdim=True)
    above = (similarity > mean) & text
    return torch.where(above.any(dim=1, keepdim=True), above, text)


def relevance(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """Attention of the raters, averaged over heads and then raters, ``(B, N)`` float32."""
    rate = raters(language, count).float()
    attention = language.attention(checked_layer(language, layer)).float().mean(dim=1)
    visual = visual_span(language, attention, count)
    total = products(rate[:, None, :], visual)[:, 0]
    return total / rate.sum(dim=1, keepdim=True)


def recycled(score: Tensor, kept: Tensor) -> Tensor:
    """Pruned tokens that are recycled ``(B, n)``, by descending score ``(B, N)``."""
    pruned = score.shape[1] - kept.shape[1]
    rest = score.masked_fill(mask_of(kept, score.shape[1]), -torch.inf)
    return ranked(rest)[:, : recycled_count(pruned)]


def centres(members: Tensor, rows: Tensor) -> Tensor:
    """Mean row of each cluster ``(B, C, D)`` float32; ``members`` as returned by ``clusters``."""
    total = products(members.transpose(1, 2), rows.float())
    return total / (members.sum(dim=1) + 1e-6)[:, :, None]
