"""Base policies that pick what covers the tokens, or the words, that are not covered yet."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.greedy import Sets, greedy_policy
from vllm_autoprune.ops.greedy import greedy_coverage
from vllm_autoprune.ops.similarity import cosines, cosines_between, plain_cosines
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams
from vllm_autoprune.tpdsl.tokens import VisualTokens


def _covered_by(degrees: Tensor, mask: Tensor) -> Tensor:
    """How well the candidates in a mask ``(B, N)`` cover each row: ``(B, R)``, at least 0."""
    return degrees.masked_fill(~mask[:, :, None], 0.0).amax(dim=1).clamp_min(0)


class _ScopeParams(PolicyParams):
    """Parameters of SCOPE."""

    alpha: float = Field(
        1.0,
        ge=0.0,
        le=4.0,
        description="exponent of the attention that weighs a token's gain",
    )


@greedy_policy(_ScopeParams, needs=frozenset({"cls_attention", "encoder"}), cost=25.3)
def _scope(
    params: _ScopeParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy coverage of the encoder's tokens, each gain times the attention of [CLS].

    Source: SCOPE (NeurIPS 2025, arXiv 2510.24214) and its published code.
    """
    sets = Sets(tokens, budget, start)
    attention = tokens.require_cls_attention().float()
    similarity = plain_cosines(sets.of(tokens.require_encoder()).float())
    picks = greedy_coverage(
        similarity,
        sets.of(attention**params.alpha),
        sets.shares[0],
        covered=_covered_by(similarity, sets.given),
        taken=sets.closed,
        floor=1e-9,  # from the first weighted gain of at most this on, tokens are picked by weight
    )
    return sets.join(picks)


class _MMTokParams(PolicyParams):
    """Parameters of MMTok."""

    alpha: float = Field(
        0.5,
        ge=0.0,
        le=4.0,
        description="weight of covering the image beside covering the words",
    )
    tau_text: float = Field(
        0.02,
        ge=0.005,
        le=1.0,
        description="temperature between words and tokens; published for Qwen2.5-VL: 0.01",
    )
    tau_vision: float = Field(
        0.2, ge=0.005, le=1.0, description="temperature between tokens of the image"
    )
    words: bool = Field(True, description="false: cover the image alone")


class _MMTokCoreParams(_MMTokParams):
    """Parameters of MMTok without the question."""

    words: Literal[False] = Field(False, description="a core reads no question")


@greedy_policy(
    _MMTokParams,
    needs=frozenset({"encoder", "words"}),
    reads=lambda params: frozenset(
        {"encoder", "words"} if params.words else {"encoder"}
    ),
    core=_MMTokCoreParams,
    cost=26.6,
)
def _mmtok(
    params: _MMTokParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy coverage of the question's words and of the image's own tokens.

    Source: MMTok (ICLR 2026, arXiv 2508.18264) and its published code.
    """
    sets = Sets(tokens, budget, start)
    rows = sets.of(tokens.require_encoder())
    covers = (
        cosines(rows, rows.norm(dim=-1, keepdim=True))
        .div_(params.tau_vision)
        .softmax(dim=2)
    )
    # How well each token covers each word, with 0 for padding, and each token of its tile:
    # (B * T, n, W + n).
    degrees = covers.transpose(1, 2) * (params.alpha / rows.shape[1])
    if params.words:
        words = tokens.require_words()
        tiles = tokens.grid.tiles
        embeddings = words.embeddings.to(tokens.output.dtype).repeat_interleave(
            tiles, dim=0
        )
        cosine = cosines_between(sets.of(tokens.output), embeddings)
        used = words.used.repeat_interleave(tiles, dim=0)[:, None, :]
        share = (cosine / params.tau_text).softmax(dim=1)
        share = share / used.sum(dim=2, keepdim=True).clamp_min(1)
        degrees = torch.cat([torch.where(used, share, 0.0), degrees], dim=2)
    picks = greedy_coverage(
        degrees,
        degrees.new_zeros(degrees.shape[:2]),
        sets.shares[0],
        covered=_covered_by(degrees, sets.given),
        taken=sets.closed,
        floor=1e-12,  # from the first gain of at most this on, tokens are picked by index
        scale=False,
    )
    return sets.join(picks)
