"""Similarity kernels (S): how redundant two tokens are to each other.

A kernel L = diag(q) S diag(q) is kept as its factors S and q: greedy selection reads only K rows of
L, which it computes one at a time, so L is never materialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.centring import scale_to_unit_variance, subtract_mean
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.ops.similarity import plain_cosines
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, OneOf, added, atom
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True, slots=True)
class Kernel:
    """L = diag(quality) similarity diag(quality): ``(B, N, N)`` and ``(B, N)``, float32."""

    similarity: Tensor
    quality: Tensor


class CosineKernel(AtomCall):
    """Parameters of pairwise_cosine_kernel."""

    clamp_negative: bool = Field(False, description="count negative cosines as 0")
    shifted: bool = added(False, description="(1 + cosine) / 2, within 0 to 1")


class ConditionalKernel(AtomCall):
    """Parameters of runtime_conditional_similarity_kernel."""

    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="strength of the exponential weight of quality; null: quality itself",
    )
    eps: float = Field(
        1e-6,
        ge=1e-8,
        le=1e-3,
        description="added to the normalised quality, so that it is above 0 for every token",
    )


class CentredKernel(AtomCall):
    """Parameters of centred_cosine_kernel."""

    scale_variance: bool = Field(
        False, description="divide every channel by its deviation in the image first"
    )
    weighted: bool = Field(False, description="scale by the normalised token quality on both sides")


SimilarityKernel = Annotated[AtomCall, OneOf("similarity_kernel")]


def sharpen(quality: Tensor, theta: float | None) -> Tensor:
    """exp(alpha q) with alpha = theta / (2 (1 - theta)); q itself if theta is None."""
    return quality if theta is None else torch.exp(theta / (2 * (1 - theta)) * quality)


def conditional_kernel(
    tokens: VisualTokens, r: Tensor, eps: float = 1e-6, theta: float | None = None
) -> Kernel:
    """Kernel diag(r) S diag(r) of cosines S, with r ``(B, N)`` min-max normalised."""
    return Kernel(tokens.cosine, sharpen(min_max_normalise(r, eps), theta))


@atom("similarity_kernel", CosineKernel)
def pairwise_cosine_kernel(call: CosineKernel, tokens: VisualTokens, g: Tensor) -> Kernel:
    """Cosine of token features, independent of token quality."""
    cosine = tokens.cosine.clamp_min(0) if call.clamp_negative else tokens.cosine
    if call.shifted:
        cosine = ((1 + cosine) / 2).clamp(0, 1)
    return Kernel(cosine, torch.ones_like(g))


@atom("similarity_kernel", ConditionalKernel)
def runtime_conditional_similarity_kernel(
    call: ConditionalKernel, tokens: VisualTokens, g: Tensor
) -> Kernel:
    """Cosine of token features, scaled on both sides by the normalised token quality."""
    return conditional_kernel(tokens, g, call.eps, call.theta)


@atom("similarity_kernel", CentredKernel, origin="extension")
def centred_cosine_kernel(call: CentredKernel, tokens: VisualTokens, g: Tensor) -> Kernel:
    """Cosine of token features less the mean token of their tile (Cen-Prune's similarity)."""
    rows = tokens.by_tile(tokens.features).float()
    if call.scale_variance:
        rows = scale_to_unit_variance(rows)
    similarity = plain_cosines(tokens.by_image(subtract_mean(rows)))
    return Kernel(similarity, min_max_normalise(g, 1e-6) if call.weighted else torch.ones_like(g))


def run_kernel(call: AtomCall, tokens: VisualTokens, g: Tensor) -> Kernel:
    """Compute the kernel of a call, for token quality g ``(B, N)``."""
    kernel = ATOMS.of(call).function(call, tokens, g)
    assert isinstance(kernel, Kernel)
    return kernel
