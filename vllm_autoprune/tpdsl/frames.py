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
        ahead = 0
        if self.first != "as_others":
            ahead = size if self.first == "whole" else max(1, total // count)
            ahead = max(min(size, total, ahead), total - (count - 1) * size)
        begin = min(ahead, 1)
        remaining = total - ahead
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
        return torch.cat([shares.new_full((tokens.batch, begin), ahead), shares], dim=1)


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
    order = rank_descending(score.view(-1, count, size))
    turn = torch.arange(size, device=order.device).expand_as(order)
    rank = torch.zeros_like(order).scatter_(2, order, turn)
    mask = mask_from_indices(start.indices, tokens.count)
    preselected = mask.view(-1, count, size).sum(dim=2)
    shares = frames.shares(tokens, budget + start.indices.shape[1]) - preselected
    later = (rank >= shares[:, :, None]).to(torch.int64)
    if frames.first == "quota":
        # The first frame gets more tokens only if the other frames have no more to give.
        later = torch.cat([2 * later[:, :1], later[:, 1:]], dim=1)
    later = later.view(tokens.batch, -1).masked_fill(start.closed, 3)
    order = rank_descending(score)
    by_share = later.gather(1, order).argsort(dim=1, stable=True)
    return order.gather(1, by_share)[:, :budget]


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
    last = torch.full_like(start.closed, tokens.count, dtype=torch.int64)
    return -last.scatter_reduce(1, picks, turn, "amin").float()
