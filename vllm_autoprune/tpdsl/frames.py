"""Frames: how the kept tokens of a video are distributed over its frames.

A base policy ranks the tokens of a frame or of the whole video, by score or by the order of its
picks. This module decides how many tokens each frame keeps; tokens of a core count too.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import mask_from_indices, rank_descending
from vllm_autoprune.ops.videos import curvature, split_exactly, typicality
from vllm_autoprune.tpdsl.atoms.source import Budget, BudgetCall
from vllm_autoprune.tpdsl.base_policy import BasePolicy, Given, PolicyParams
from vllm_autoprune.tpdsl.registry import StatePart, default_call
from vllm_autoprune.tpdsl.tokens import VisualTokens

_TAU = {"curvature": 0.7, "uniqueness": 0.01}
"""Temperatures of V-CAST (arXiv 2603.27650) and VidCom2 (EMNLP 2025), as published."""


class Frames(StatePart):
    """Extension: prune videos frame by frame; without this group they stay whole."""

    tokens: Budget = Field(
        default_factory=lambda: default_call(BudgetCall, "per_frame_budget"),
        description="number of tokens kept per video",
    )
    budget: Literal["uniform", "curvature", "uniqueness", "global"] = Field(
        default="uniform",
        description="tokens of a frame; curvature: by the turn that the mean token takes there; "
        "uniqueness: by distance from the mean of the video; global: what ranks highest in all",
    )
    tau: float | None = Field(
        default=None,
        ge=0.01,
        le=10.0,
        description="temperature of curvature or uniqueness, above it shares are more alike; null: "
        "as published, 0.7 and 0.01",
    )
    low: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="least tokens of a frame, where K has as many for all; with uniqueness, before "
        "the score makes them K",
    )
    first: Literal["whole", "quota", "as_others"] = Field(
        default="as_others",
        description="tokens of the first frame; whole: all; quota: K / T, at least 1",
    )

    def __str__(self) -> str:
        fields = self.model_dump(exclude={"tokens"}, exclude_defaults=True)
        parts = [f"{name} {value}" for name, value in fields.items()]
        return ", ".join([str(self.tokens.rule()), *parts])

    def shares(self, tokens: VisualTokens, total: int) -> Tensor:
        """Initial number of tokens ``(B, T)`` int64 that each frame keeps.

        Their sum is less than ``total`` with a global budget, and may exceed it with a uniqueness
        budget; the score then decides which tokens are kept.
        """
        count = tokens.grid.tiles
        size = tokens.grid.per_tile
        first_share = 0
        if self.first != "as_others":
            first_share = size if self.first == "whole" else max(1, total // count)
            first_share = min(size, total, first_share)
            first_share = max(first_share, total - (count - 1) * size)
        # The frames from `begin` on share the remaining tokens.
        begin = min(first_share, 1)
        remaining = total - first_share
        frames = count - begin
        low = min(self.low, size) if self.low * frames <= remaining else 0
        shape = (tokens.batch, frames)
        device = tokens.features.device
        if self.budget == "global" or frames == 0:
            shares = torch.full(shape, low, device=device)
        elif self.budget == "uniform":
            extra = torch.arange(frames, device=device) < remaining % frames
            shares = (remaining // frames + extra.to(torch.int64)).expand(shape)
        else:
            tau = _TAU[self.budget] if self.tau is None else self.tau
            videos = tokens.features.reshape(tokens.batch, count, size, -1)
            if self.budget == "curvature":
                bends = torch.stack([curvature(video.float()) for video in videos])
                weights = (bends[:, begin:] / tau).softmax(dim=1)
                shares = split_exactly(weights, remaining, low, size)
            else:
                common = torch.stack(
                    [typicality(video.float())[0].mean(dim=1) for video in videos]
                )
                unique = (-common[:, begin:].double() / tau).softmax(dim=1)
                factor = 1 + unique - unique.mean(dim=1, keepdim=True)
                ratio = remaining / (frames * size) * factor
                ratio = ratio.nan_to_num().clamp_max(1)
                shares = (size * ratio).round().to(torch.int64)
                shares = shares.clamp(low, size)
        first_column = shares.new_full((tokens.batch, begin), first_share)
        return torch.cat([first_column, shares], dim=1)


def pick_from_frames(
    frames: Frames,
    policy: BasePolicy,
    params: PolicyParams,
    tokens: VisualTokens,
    budget: int,
    start: Given,
) -> Tensor:
    """Picks ``(B, K)`` of videos in pick order, besides the given tokens; closed tokens come last.

    Tokens within the share of their frame come before all tokens beyond it.
    """
    score = _score(policy, params, tokens, start).masked_fill(start.closed, -torch.inf)
    count = tokens.grid.tiles
    size = tokens.grid.per_tile
    order_in_frame = rank_descending(score.view(-1, count, size))
    ascending = torch.arange(size, device=score.device).expand_as(order_in_frame)
    rank = torch.zeros_like(order_in_frame).scatter_(2, order_in_frame, ascending)
    mask = mask_from_indices(start.indices, tokens.count)
    preselected = mask.view(-1, count, size).sum(dim=2)
    shares = frames.shares(tokens, budget + start.indices.shape[1]) - preselected
    # Tiers are picked from in ascending order, and within a tier by score.
    tier = (rank >= shares[:, :, None]).to(torch.int64)
    if frames.first == "quota":
        # The first frame gets more tokens only if the other frames have no more to give.
        tier = torch.cat([2 * tier[:, :1], tier[:, 1:]], dim=1)
    tier = tier.view(tokens.batch, -1).masked_fill(start.closed, 3)
    order = rank_descending(score)
    by_tier = tier.gather(1, order).argsort(dim=1, stable=True)
    return order.gather(1, by_tier)[:, :budget]


def _score(
    policy: BasePolicy, params: PolicyParams, tokens: VisualTokens, start: Given
) -> Tensor:
    """Score ``(B, N)`` float32 by which a base policy ranks tokens, after the given ones."""
    if policy.score is not None:
        score: Tensor = policy.score(params, tokens)
        return score.float().nan_to_num(nan=-torch.inf)
    # Without a score, tokens rank by the order of nearly all picks, taken in turn from every frame;
    # what is merged into them is left out. A frame with fewer open tokens than requested repeats
    # some, whose first pick counts.
    maximum = tokens.count - 1
    if policy.continuation is not None:
        picks: Tensor = policy.continuation(params, tokens, maximum, start)
    else:
        picks = policy.function(params, tokens, maximum).picks
    turn = torch.arange(picks.shape[1], device=picks.device).expand_as(picks)
    unpicked = torch.full_like(start.closed, tokens.count, dtype=torch.int64)
    return -unpicked.scatter_reduce(1, picks, turn, "amin").float()
