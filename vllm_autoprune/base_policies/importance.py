"""Base policies that pick the most important token next: by norm, attention or relevance."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.greedy import SCOPE, Sets, greedy_policy
from vllm_autoprune.ops.rowwise import argmax_within, rank_descending, row_offsets
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens


class _NormParams(PolicyParams):
    """Parameters of the norm."""

    tile_scope: TileScope = Field("global", description=SCOPE)


@greedy_policy(_NormParams, cost=3.0)
def _norm(
    params: _NormParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """The tokens of largest norm: a control, not a published method."""
    sets = Sets(tokens, budget, start, params.tile_scope == "global")
    norm = sets.of(tokens.norm[:, :, 0].float()).masked_fill(sets.closed, -1.0)
    return sets.join(rank_descending(norm)[:, : sets.shares[0]])


class _IDPrunerParams(PolicyParams):
    """Parameters of IDPruner."""

    balance: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of importance; the rest is dissimilarity (lambda)",
    )
    importance: Literal["attention", "relevance"] = Field(
        "attention", description="attention of [CLS], or relevance to the question"
    )


class _IDPrunerCoreParams(_IDPrunerParams):
    """Parameters of IDPruner without the question."""

    importance: Literal["attention"] = Field(
        "attention", description="a core reads no question"
    )


@greedy_policy(
    _IDPrunerParams,
    needs=frozenset({"cls_attention", "instruction"}),
    reads=lambda params: frozenset(
        {"cls_attention"} if params.importance == "attention" else {"instruction"}
    ),
    core=_IDPrunerCoreParams,
    cost=29.5,
)
def _idpruner(
    params: _IDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Marginal relevance: the most important tokens that are unlike those picked before.

    Source: IDPruner (arXiv 2602.13315) and its published code in AngelSlim, whose importance is a
    trained network. Here importance is attention or relevance [ours], so its published accuracy
    does not carry over. Picks are by balance * importance - (1 - balance) * similarity to the
    picks; ties go to the lower index.
    """
    sets = Sets(tokens, budget, start)
    if params.importance == "attention":
        raw = tokens.require_cls_attention().float()
    else:
        raw = tokens.require_instruction().relevance()
    # Importance (B * T, n) in [0, 1], normalised within each tile, with the published 1e-6.
    raw = sets.of(raw)
    low = raw.amin(dim=1, keepdim=True)
    high = raw.amax(dim=1, keepdim=True)
    importance = (raw - low) / (high - low + 1e-6)
    balance = params.balance
    similarity = tokens.precise_tile_cosine
    mask = sets.given
    free = ~sets.closed

    rows, size = importance.shape
    offset = row_offsets(rows, size, importance.device)
    flat = similarity.reshape(rows * size, size)
    closest = -sets.nearest_given(-similarity)
    begins = ~mask.any(dim=1, keepdim=True)
    picks = [torch.empty(rows, 0, dtype=torch.int64, device=importance.device)]
    for _ in range(sets.shares[0]):
        score = balance * importance - (1 - balance) * closest
        # Where nothing is given or picked yet, the most important token comes first.
        score = torch.where(begins, importance, score)
        score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        # NaN ranks below any number, but above a token that is taken.
        score = torch.where(
            free, score.clamp_min(torch.finfo(score.dtype).min), -torch.inf
        )
        pick, _ = argmax_within(score)
        picks.append(pick[:, None])
        free = free.scatter(1, pick[:, None], False)
        row = flat.index_select(0, offset + pick)
        closest = torch.where(begins, row, torch.fmax(closest, row))
        begins = torch.zeros_like(begins)
    return sets.join(torch.cat(picks, dim=1))
