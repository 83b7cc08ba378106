"""Similarity kernels (S): what makes two tokens redundant to each other.

Knows nothing about which selector uses the kernel.

A kernel is kept factored, L = diag(q) S diag(q), because the greedy selection needs only K of
its rows: the product with the qualities is formed a row at a time and L itself never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.numerics import normalise
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True, slots=True)
class Kernel:
    """L = diag(quality) similarity diag(quality): ``(B, N, N)`` and ``(B, N)``, float32."""

    similarity: Tensor
    quality: Tensor


class CosineKernel(AtomCall):
    """Parameters of pairwise_cosine_kernel."""

    clamp_negative: bool = Field(False, description="treat opposite tokens as unrelated")


class ConditionalKernel(AtomCall):
    """Parameters of runtime_conditional_similarity_kernel."""

    theta: float | None = Field(None, ge=0.0, le=0.95, description="weight of quality; null: plain")
    eps: float = Field(1e-6, ge=1e-8, le=1e-3, description="keeps the worst token's quality > 0")


SimilarityKernel = Annotated[AtomCall, OneOf("similarity_kernel")]


def sharpen(quality: Tensor, theta: float | None) -> Tensor:
    """exp(alpha q), alpha = theta / (2 (1 - theta)); the plain quality where theta is null."""
    return quality if theta is None else torch.exp(theta / (2 * (1 - theta)) * quality)


def conditioned(
    tokens: VisualTokens, r: Tensor, eps: float = 1e-6, theta: float | None = None
) -> Kernel:
    """diag(r) S diag(r) with r ``(B, N)`` min-max normalised."""
    return Kernel(tokens.cosine, sharpen(normalise(r, eps), theta))


@atom("similarity_kernel", CosineKernel)
def pairwise_cosine_kernel(call: CosineKernel, tokens: VisualTokens, g: Tensor) -> Kernel:
    """Cosine of token features, blind to quality."""
    cosine = tokens.cosine.clamp_min(0) if call.clamp_negative else tokens.cosine
    return Kernel(cosine, torch.ones_like(g))


@atom("similarity_kernel", ConditionalKernel)
def runtime_conditional_similarity_kernel(
    call: ConditionalKernel, tokens: VisualTokens, g: Tensor
) -> Kernel:
    """Cosine of token features, scaled on both sides by the normalised token quality."""
    return conditioned(tokens, g, call.eps, call.theta)


def run_kernel(call: AtomCall, tokens: VisualTokens, g: Tensor) -> Kernel:
    """The kernel that a call names, for token quality g ``(B, N)``."""
    kernel = ATOMS.of(call).function(call, tokens, g)
    assert isinstance(kernel, Kernel)
    return kernel
