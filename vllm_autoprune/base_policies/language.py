"""Base policies that were published as pruning inside the language model.

They read the first layers of the language model and select before prefill [ours], so that removed
tokens never enter the KV cache.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices, rank_descending
from vllm_autoprune.ops.similarity import cosines_with, matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.prefix import MOST_LAYERS, LanguagePrefix
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _FastVParams(PolicyParams):
    """Parameters of FastV."""

    layer: int = Field(
        2,
        ge=1,
        le=MOST_LAYERS,
        description="layer before which FastV prunes, from 0; the layer before it is read",
    )

    def layers_read(self, layers: int) -> int:
        """Number of layers before the one whose attention ranks, which itself need not run."""
        return self.layer - 1


@base_policy(_FastVParams, needs=frozenset({"language"}), cost=0.6)
def _fastv(
    params: _FastVParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """The tokens with most attention from the last instruction token, averaged over heads.

    Source: Chen et al., "An Image is Worth 1/2 Tokens After Layer 2" (ECCV 2024), and its published
    code, which prunes before layer 2 by the attention of layer 1. Here the same scores select
    before prefill, and K is the number of tokens that enter the model [ours].
    """
    language = tokens.require_language()
    score = language.last_token_attention(params.layer - 1, tokens.count)
    return ReferenceSelection(rank_descending(score)[:, :budget])


class _PyramidDropParams(PolicyParams):
    """Parameters of PyramidDrop."""

    layer: int | None = Field(
        None,
        ge=0,
        le=MOST_LAYERS,
        description="layer whose attention ranks, counted from 0; null: a quarter of the model's "
        "layers, the published first stage. The published last stage (24 of 32) runs three "
        "quarters of the prefill to save the rest of it",
    )

    def layers_read(self, layers: int) -> int:
        """Number of layers before the one whose attention ranks, by default ``layers // 4``."""
        return layers // 4 if self.layer is None else self.layer


@base_policy(_PyramidDropParams, needs=frozenset({"language"}), cost=0.6)
def _pyramiddrop(
    params: _PyramidDropParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """One stage: the tokens with most attention from the last instruction token.

    Source: Xing et al., "PyramidDrop" (CVPR 2025), and its published code. It drops in stages,
    after a quarter, a half and three quarters of the layers (8, 16 and 24 of 32), each time by the
    attention of the next layer. Before prefill only one stage is possible [ours]: it keeps K
    tokens.
    """
    language = tokens.require_language()
    # Attention of a layer needs only the layers before it, counted from 0.
    layer = params.layers_read(language.layers)
    score = language.last_token_attention(layer, tokens.count)
    return ReferenceSelection(rank_descending(score)[:, :budget])


_PIVOTS = 4

_SLOTS = 32
"""Size of CPython's hash table for a set of five to eight small integers."""


class _DartParams(PolicyParams):
    """Parameters of DART."""

    space: Literal["layer", "embeddings"] = Field(
        "layer",
        description="layer: keys and normed states of a layer, as published; embeddings: what "
        "enters the language model, which needs no layer",
    )
    layer: int = Field(
        2,
        ge=1,
        le=MOST_LAYERS,
        description="layer before which DART prunes, counted from 0; the layer before it is read",
    )

    def layers_read(self, layers: int) -> int:
        """Number of layers up to the one whose states are compared; 0 for input embeddings."""
        return self.layer if self.space == "layer" else 0


@base_policy(_DartParams, needs=frozenset({"language"}), cost=3.4)
def _dart(params: _DartParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Four visual pivots, then the tokens least similar to each visual and text pivot.

    Source: Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models:
    Duplication Matters More" (EMNLP 2025). The authors' repository contains no code; this follows
    the port in LightCompress. Here tokens are selected before prefill [ours], by the states of an
    early layer or by the input embeddings alone.
    """
    language = tokens.require_language()
    count = tokens.count
    # L1 norms (B, L), over all heads together, rank the pivots; states (B, L, D) are compared.
    if params.space == "embeddings":
        states = language.embeddings().float()
        norms = states.abs().sum(dim=2)
    else:
        norms = language.keys(params.layer - 1).float().abs().sum(dim=(1, 3))
        states = language.normed(params.layer - 1)

    # Visual pivots (B, 4) and word pivots (B, 4), or fewer if there are fewer tokens. If only some
    # instructions of the batch have fewer words, their strongest word is repeated [ours].
    visual = rank_descending(language.visual(norms, count))[:, :_PIVOTS][:, :budget]
    strength = language.textual(norms, count).masked_fill(~language.text, -torch.inf)
    words = rank_descending(strength)[:, :_PIVOTS]
    words = torch.where(language.text.gather(1, words), words, words[:, :1])
    pivots = torch.cat([visual, words + count], dim=1) + language.start
    # Iteration order of a CPython set without hash collisions; on a collision the lower index is
    # first.
    by_slot = (pivots % _SLOTS) * states.shape[1] + pivots
    pivots = pivots.gather(1, by_slot.argsort(dim=1, stable=True))

    # Each pivot takes its share of the remaining tokens, least similar first.
    quota, remainder = divmod(budget - visual.shape[1], pivots.shape[1])
    image = states.narrow(1, language.start, count)
    dissimilarity = -cosines_with(gather_rows(states, pivots), image)
    taken = mask_from_indices(visual, count)
    picks = [visual]
    for turn in range(pivots.shape[1]):
        # NaN ranks last among the remaining tokens, but before those already taken.
        score = (
            dissimilarity[:, turn].nan_to_num(nan=-2.0).masked_fill(taken, -torch.inf)
        )
        chosen = rank_descending(score)[:, : quota + (turn < remainder)]
        taken.scatter_(1, chosen, True)
        picks.append(chosen)
    return ReferenceSelection(torch.cat(picks, dim=1))


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

    def layers_read(self, layers: int) -> int:
        """Number of layers before the one whose attention ranks, plus that one if it recycles."""
        return self.layer + self.recycle


@base_policy(_SparseVLMParams, needs=frozenset({"language"}), cost=0.6)
def _sparsevlm(
    params: _SparseVLMParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """The tokens with most attention from visually relevant text tokens, averaged over heads.

    Source: Zhang et al., "SparseVLM" (ICML 2025), and its published code, first version. It prunes
    after layers 2, 6 and 15 to fixed counts (the paper's adaptive count is not in the code) and
    recycles a share of the pruned tokens as cluster means. Here one stage keeps K tokens [ours].
    """
    language = tokens.require_language()
    order = rank_descending(_rater_attention(language, params.layer, tokens.count))
    extra = 0
    if params.recycle:
        # One cluster for every ten recycled tokens.
        extra = min(_recycled_count(tokens.count - budget) // 10 + 1, budget // 2)
    picks = order[:, : budget - extra]
    if extra == 0:
        return ReferenceSelection(picks)
    # As published, clusters are computed from the layer's states. Their means are of the rows that
    # enter the language model, because each mean becomes such a row.
    sources = order[:, picks.shape[1] :][
        :, : _recycled_count(tokens.count - picks.shape[1])
    ]
    states = language.visual(language.states(params.layer), tokens.count, dim=1)
    members = _density_peak_clusters(gather_rows(states, sources), extra)
    merged = _cluster_means(members, gather_rows(tokens.output, sources))
    return ReferenceSelection(picks, extra=merged.to(tokens.output.dtype))


def _rater_attention(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """Attention of the raters, averaged over heads and then over raters, ``(B, N)`` float32.

    Raters are text tokens whose similarity to the visual tokens is above the mean. The similarity
    is the softmax over text tokens of dot products of input embeddings, averaged over visual
    tokens. If no token is above the mean, as with a single token, all text tokens are raters
    [ours].
    """
    entering = language.embeddings().float()
    text = language.text
    words = language.textual(entering, count, dim=1)
    dots = matmul_each(language.visual(entering, count, dim=1), words.transpose(1, 2))
    similarity = (
        dots.masked_fill(~text[:, None, :], -torch.inf).softmax(dim=2).mean(dim=1)
    )
    mean = similarity.sum(dim=1, keepdim=True) / text.sum(dim=1, keepdim=True)
    above = (similarity > mean) & text
    rate = torch.where(above.any(dim=1, keepdim=True), above, text).float()
    attention = language.visual(language.attention(layer).float().mean(dim=1), count)
    return matmul_each(rate[:, None, :], attention)[:, 0] / rate.sum(
        dim=1, keepdim=True
    )


def _cluster_means(members: Tensor, rows: Tensor) -> Tensor:
    """Mean row of each cluster ``(B, C, D)`` float32; ``members`` is the one-hot membership."""
    total = matmul_each(members.transpose(1, 2), rows.float())
    return total / (members.sum(dim=1) + 1e-6)[:, :, None]


def _recycled_count(pruned: int) -> int:
    """Number of tokens to recycle among ``pruned`` ones."""
    return min(pruned, int(0.3 * pruned) + 1)


def _density_peak_clusters(
    states: Tensor, count: int, *, break_ties: bool = True
) -> Tensor:
    """Density-peak clustering (Du et al. 2016, DPC-KNN) of states ``(B, n, D)``.

    Returns one-hot membership ``(B, n, count)`` float32.

    Centres are the ``count`` tokens with the largest product of density and distance to the nearest
    denser token; every token belongs to its nearest centre. The published code adds random noise
    of 1e-6 to the density to break ties. Here the lower index counts as denser [ours], or ties stay
    unbroken, as in the golden cases, which were recorded without noise.
    """
    states = states.float()
    distance = (
        torch.stack([torch.cdist(image, image) for image in states])
        / states.shape[2] ** 0.5
    )
    near = distance.topk(min(count, distance.shape[2]), dim=2, largest=False).values
    density = (-near.square().mean(dim=2)).exp()
    denser = density[:, None, :] > density[:, :, None]
    if break_ties:
        index = torch.arange(states.shape[1], device=states.device)
        ties = density[:, None, :] == density[:, :, None]
        denser |= ties & (index < index[:, None])
    farthest = distance.flatten(1).amax(dim=1)[:, None, None]
    apart = torch.where(denser, distance, farthest).amin(dim=2)
    chosen = (apart * density).argsort(dim=1, descending=True, stable=True)[:, :count]
    towards = distance.gather(1, chosen[:, :, None].expand(-1, -1, distance.shape[2]))
    nearest = towards.argmin(dim=1)
    members = torch.zeros(*nearest.shape, count, device=states.device)
    return members.scatter_(2, nearest[:, :, None], 1.0)
