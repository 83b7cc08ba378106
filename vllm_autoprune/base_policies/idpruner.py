"""IDPruner's selection: maximal marginal relevance of important and dissimilar tokens.

Source: IDPruner (arXiv 2602.13315) and its published code in AngelSlim, whose importance is a
trained network. Here importance is attention or relevance [ours], so its published accuracy does
not carry over.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import distance_to_kept
from vllm_autoprune.ops.rowwise import argmax_within
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import VisualTokens, join_tiles, split_over_tiles

_OFFSET = 1e-6
"""Added to the range that importance is divided by, as published."""


class _IDPrunerParams(PolicyParams):
    """Parameters of IDPruner."""

    balance: float = Field(
        0.5, ge=0.0, le=1.0, description="share of importance; the rest is dissimilarity (lambda)"
    )
    importance: Literal["attention", "relevance"] = Field(
        "attention", description="attention of [CLS], or relevance to the question"
    )


class _IDPrunerCoreParams(_IDPrunerParams):
    """Parameters of IDPruner without the question."""

    importance: Literal["attention"] = Field("attention", description="a core reads no question")


def _select(params: _IDPrunerParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Marginal relevance, starting from the similarity to the given tokens.

    Picks of each tile by balance * importance - (1 - balance) * similarity to the picks; ties go to
    the lower index.
    """
    if params.importance == "attention":
        score = tokens.require_cls_attention().float()
    else:
        instruction = tokens.require_instruction()
        score = instruction.sign * instruction_relevance(instruction)
    # Importance (B * T, n) in [0, 1], normalised within each tile.
    score = tokens.by_tile(score)
    low, high = score.amin(dim=1, keepdim=True), score.amax(dim=1, keepdim=True)
    importance, balance = (score - low) / (high - low + _OFFSET), params.balance
    similarity = tokens.precise_tile_cosine
    kept, free = tokens.by_tile(start.kept(tokens)), tokens.by_tile(~start.closed)
    shares = split_over_tiles(budget, tokens.grid.tiles)

    rows, size = importance.shape
    offset = torch.arange(0, rows * size, size, device=importance.device)
    flat = similarity.reshape(rows * size, size)
    closest = -distance_to_kept(-similarity, kept)
    begins = ~kept.any(dim=1, keepdim=True)
    picks = [torch.empty(rows, 0, dtype=torch.int64, device=importance.device)]
    for _ in range(shares[0]):
        score = balance * importance - (1 - balance) * closest
        # Where nothing is kept yet, the most important token comes first.
        score = torch.where(begins, importance, score)
        score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        # NaN counts less than any number, but more than a token that is taken.
        score = torch.where(free, score.clamp_min(torch.finfo(score.dtype).min), -torch.inf)
        pick, _ = argmax_within(score)
        picks.append(pick[:, None])
        free = free.scatter(1, pick[:, None], False)
        row = flat.index_select(0, offset + pick)
        closest = torch.where(begins, row, torch.fmax(closest, row))
        begins = torch.zeros_like(begins)
    return join_tiles(torch.cat(picks, dim=1), tokens, shares, start.next_tile(tokens))


@base_policy(
    _IDPrunerParams,
    needs=frozenset({"cls_attention", "instruction"}),
    continuation=_select,
    reads=lambda params: frozenset(
        {"cls_attention"} if params.importance == "attention" else {"instruction"}
    ),
    core=_IDPrunerCoreParams,
)
def idpruner(params: _IDPrunerParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Marginal relevance: the most important tokens that are unlike those picked before."""
    return ReferenceSelection(_select(params, tokens, budget, Given.none(tokens)))
