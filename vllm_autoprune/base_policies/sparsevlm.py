"""SparseVLM: keep the visual tokens that the instruction's visual words attend to.

Knows nothing about how the language model's first layers are run.

Source: Zhang et al., "SparseVLM" (ICML 2025), and its published code, first version. It prunes
after layers 2, 6 and 15 to fixed counts (the paper's adaptive count is not in the code) and
recycles a share of what is pruned into cluster centres. Here one stage keeps K at once [ours].
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
        description="give up to half of K to cluster centres of what is pruned, as published",
    )


def native(params: SparseVLMParams, tokens: VisualTokens, budget: int | None) -> Native:
    """One stage: the kept tokens in raster order, then the clusters, of what left the layer."""
    language = tokens.require_language()
    score = relevance(language, params.layer, tokens.count)
    count = min(counted("sparsevlm", budget), tokens.count - 1)
    kept = ranked(score)[:, :count].sort(dim=1).values
    left = visual_span(language, language.states(params.layer), tokens.count, dim=1)
    sources = recycled(score, kept)
    made = cluster_count(sources.shape[1])
    members = clusters(gather_rows(left, sources), made, break_ties=False)
    merged = centres(members, gather_rows(left, sources))
    none = kept.new_full((tokens.batch, merged.shape[1]), -1)
    rows = torch.cat([gather_rows(left, kept).float(), merged], dim=1)
    return Native(tuple(torch.cat([kept, none], dim=1)), tuple(rows))


@base_policy(SparseVLMParams, needs=frozenset({"language"}), native=native)
def sparsevlm(params: SparseVLMParams, tokens: VisualTokens, budget: int) -> Reference:
    """The tokens that the instruction's visual words attend to most, averaged over heads."""
    language = tokens.require_language()
    order = ranked(relevance(language, params.layer, tokens.count))
    extra = 0
    if params.recycle:
        extra = min(cluster_count(recycled_count(tokens.count - budget)), budget // 2)
    picks = order[:, : budget - extra]
    if extra == 0:
        return Reference(picks)
    # Clusters are found where the published code finds them, in the layer's states, but made of
    # what enters the language model, because that is what they become.
    sources = order[:, picks.shape[1] :][:, : recycled_count(tokens.count - picks.shape[1])]
    left = visual_span(language, language.states(params.layer), tokens.count, dim=1)
    members = clusters(gather_rows(left, sources), extra)
    merged = centres(members, gather_rows(tokens.features, sources))
    return Reference(picks, extra=merged.to(tokens.features.dtype))


def raters(language: LanguagePrefix, count: int) -> Tensor:
    """``(B, Lt)`` bool: text tokens that the image's tokens are, on average, most like.

    Softmax over the text of plain dot products of input embeddings, averaged over visual tokens;
    raters lie above the mean. Where none does, as with a single token, all of them rate [ours].
    """
    entering, text = language.embeddings().float(), language.text
    visual = visual_span(language, entering, count, dim=1)
    words = text_span(language, entering, count, dim=1)
    dots = products(visual, words.transpose(1, 2))
    likeness = dots.masked_fill(~text[:, None, :], -torch.inf).softmax(dim=2).mean(dim=1)
    mean = likeness.sum(dim=1, keepdim=True) / text.sum(dim=1, keepdim=True)
    above = (likeness > mean) & text
    return torch.where(above.any(dim=1, keepdim=True), above, text)


def relevance(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """``(B, N)`` float32: attention that the raters pay, averaged over heads, then raters."""
    rate = raters(language, count).float()
    attention = language.attention(checked_layer(language, layer)).float().mean(dim=1)
    visual = visual_span(language, attention, count)
    total = products(rate[:, None, :], visual)[:, 0]
    return total / rate.sum(dim=1, keepdim=True)


def recycled(score: Tensor, kept: Tensor) -> Tensor:
    """``(B, n)``: the pruned tokens that are recycled, by descending score ``(B, N)``."""
    pruned = score.shape[1] - kept.shape[1]
    rest = score.masked_fill(mask_of(kept, score.shape[1]), -torch.inf)
    return ranked(rest)[:, : recycled_count(pruned)]


def centres(members: Tensor, rows: Tensor) -> Tensor:
    """``(B, C, D)`` float32: the mean of each cluster's rows, ``members`` as from ``clusters``."""
    total = products(members.transpose(1, 2), rows.float())
    return total / (members.sum(dim=1) + 1e-6)[:, :, None]
