"""MMTok: greedy coverage of the question's words and of all tokens of the image.

Source: MMTok (ICLR 2026, arXiv 2508.18264) and its published code.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import covered_by, greedy_coverage
from vllm_autoprune.ops.similarity import cosines, cosines_between
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles

FLOOR = 1e-12
"""Gain at or below which the other tokens come by index."""


class _MMTokParams(PolicyParams):
    """Parameters of MMTok."""

    alpha: float = Field(
        0.5, ge=0.0, le=4.0, description="weight of covering the image beside covering the words"
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


def _select(params: _MMTokParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Greedy coverage, starting from what the given tokens cover."""
    # How well each token covers each token of its tile (B * T, n, n), and each word; 0 for padding.
    rows = tokens.by_tile(tokens.require_encoder())
    covers = cosines(rows, rows.norm(dim=-1, keepdim=True)).div_(params.tau_vision).softmax(dim=2)
    degrees = covers.transpose(1, 2) * (params.alpha / rows.shape[1])
    if params.words:
        words, tiles = tokens.require_words(), tokens.grid.tiles
        embeddings = words.embeddings.to(tokens.output.dtype).repeat_interleave(tiles, dim=0)
        cosine = cosines_between(tokens.by_tile(tokens.output), embeddings)
        used = words.used.repeat_interleave(tiles, dim=0)[:, None, :]
        share = (cosine / params.tau_text).softmax(dim=1)
        share = share / used.sum(dim=2, keepdim=True).clamp_min(1)
        degrees = torch.cat([torch.where(used, share, 0.0), degrees], dim=2)
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = greedy_coverage(
        degrees,
        degrees.new_zeros(degrees.shape[:2]),
        shares[0],
        covered=covered_by(degrees, tokens.by_tile(start.kept(tokens))),
        taken=tokens.by_tile(start.closed),
        floor=FLOOR,
        scale=False,
    )
    return join_tiles(picks, tokens, shares, start.next_tile(tokens))


@base_policy(
    _MMTokParams,
    needs=frozenset({"encoder", "words"}),
    continuation=_select,
    reads=lambda params: frozenset({"encoder", "words"} if params.words else {"encoder"}),
    core=_MMTokCoreParams,
)
def mmtok(params: _MMTokParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Greedy coverage of the question's words and of the image's own tokens."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
