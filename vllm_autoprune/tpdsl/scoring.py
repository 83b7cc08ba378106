"""Scoring atoms (S): one quality signal per visual token, larger is better.

Knows nothing about weights or about what is done with a score.

Every function takes its call and B images and returns ``(B, N)`` float32. Signals are compared
after min-max normalisation, so only their order and relative gaps within an image matter.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as functional
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens


class SignalCall(AtomCall):
    """A scoring atom with its weight in the fusion."""

    weight: float = Field(1.0, ge=0.0, le=4.0, description="exponent or factor in the fusion")


class Relevance(SignalCall):
    """Parameters of instruction_guided_visual_relevance."""

    sign: Literal["auto", "+", "-"] = Field(
        "auto", description="auto: the direction that the text tower's description states"
    )
    reduce: Literal["mean", "max"] = Field("mean", description="over text segments")


class Attention(SignalCall):
    """Parameters of attention_proxy_saliency."""

    temperature: float = Field(1.0, ge=0.25, le=4.0, description="above 1 flattens the attention")


class Centrality(SignalCall):
    """Parameters of spatial_centrality_prior."""

    sigma: float = Field(0.5, ge=0.15, le=2.0, description="in half tile widths")


class Redundancy(SignalCall):
    """Parameters of redundancy_density_penalty."""

    m: int = Field(8, ge=1, le=64, description="how many of the most similar tokens count")


class Contrast(SignalCall):
    """Parameters of local_contrast_saliency."""

    radius: int = Field(1, ge=1, le=3, description="neighbourhood in tokens, Chebyshev distance")


Signal = Annotated[SignalCall, OneOf("scoring")]


def relevance(
    instruction: Instruction, reduce: Literal["mean", "max"] = "mean", sign: int = 1
) -> Tensor:
    """Cosine of each token with the instruction's segments times ``sign``, ``(B, N)``.

    An image whose instruction has no segment gets zeros: nothing is more relevant than the rest.
    """
    cosines = sign * instruction.cosines
    used = instruction.segments[:, None, :]
    if reduce == "max":
        best = cosines.masked_fill(~used, -torch.inf).amax(dim=-1)
        return torch.where(used.any(dim=-1), best, torch.zeros_like(best))
    total = torch.where(used, cosines, torch.zeros_like(cosines)).sum(dim=-1)
    return total / used.sum(dim=-1).clamp_min(1)


@atom("scoring", Relevance, needs=frozenset({"instruction"}))
def instruction_guided_visual_relevance(call: Relevance, tokens: VisualTokens) -> Tensor:
    """Cosine between each token and the instruction, in the direction that means relevance."""
    instruction = tokens.require_instruction()
    sign = instruction.sign if call.sign == "auto" else (1 if call.sign == "+" else -1)
    return relevance(instruction, call.reduce, sign)


@atom("scoring", Attention, needs=frozenset({"cls_attention"}))
def attention_proxy_saliency(call: Attention, tokens: VisualTokens) -> Tensor:
    """Attention that [CLS] pays to each token, or closeness to the mean token where none is."""
    if tokens.cls_attention is not None:
        return tokens.cls_attention.float().clamp_min(0) ** (1.0 / call.temperature)
    features = tokens.features.float()
    mean = functional.normalize(features.mean(dim=1, keepdim=True), dim=-1)
    return ((features * mean).sum(dim=-1) / call.temperature).softmax(dim=-1)


@atom("scoring", Centrality)
def spatial_centrality_prior(call: Centrality, tokens: VisualTokens) -> Tensor:
    """Gaussian of a token's distance from the centre of its tile."""
    grid, device = tokens.grid, tokens.features.device
    y = (torch.arange(grid.height, device=device) * 2 + 1) / grid.height - 1
    x = (torch.arange(grid.width, device=device) * 2 + 1) / grid.width - 1
    squared = y[:, None] ** 2 + x[None, :] ** 2
    prior = torch.exp(-squared / (2 * call.sigma**2)).flatten()
    return prior.repeat(grid.tiles).expand(tokens.batch, tokens.count)


@atom("scoring", Redundancy)
def redundancy_density_penalty(call: Redundancy, tokens: VisualTokens) -> Tensor:
    """Minus the mean cosine to the m most similar other tokens of the tile."""
    cosine = tokens.tile_cosine
    own = torch.eye(cosine.shape[-1], dtype=torch.bool, device=cosine.device)
    others = cosine.masked_fill(own, -torch.inf)
    m = min(call.m, cosine.shape[-1] - 1)
    if m == 0:
        return torch.zeros(tokens.batch, tokens.count, device=cosine.device)
    return tokens.by_image(-others.topk(m, dim=-1).values.mean(dim=-1))


@atom("scoring", Contrast)
def local_contrast_saliency(call: Contrast, tokens: VisualTokens) -> Tensor:
    """One minus the mean cosine to the tokens within grid radius r."""
    near = _neighbours(tokens.grid, call.radius, tokens.features.device)
    # From the cosines that the selection needs anyway: no second pass over the features.
    mean = (tokens.tile_cosine * near).sum(dim=-1) / near.sum(dim=-1).clamp_min(1)
    return tokens.by_image(1 - mean)


def _neighbours(grid: Grid, radius: int, device: torch.device) -> Tensor:
    """``(n, n)`` float32: 1 where two tokens of a tile lie within ``radius``, 0 for the same."""
    y = torch.arange(grid.height, device=device).repeat_interleave(grid.width)
    x = torch.arange(grid.width, device=device).repeat(grid.height)
    apart = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    return ((apart > 0) & (apart <= radius)).float()


def run_signal(call: SignalCall, tokens: VisualTokens) -> Tensor:
    """The signal that a call names, ``(B, N)`` float32."""
    score = ATOMS.of(call).function(call, tokens)
    assert isinstance(score, Tensor)
    return score.float()
