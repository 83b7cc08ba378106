"""Scoring (S): the fusion of quality signals into one, and the similarity kernel between tokens.

A fusion combines signals, each normalised to 0..1 and with a weight, into one token quality g.

A kernel L = diag(q) S diag(q) is kept as its factors S and q: greedy selection reads only K rows of
L, which it computes one at a time, so L is never materialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.ops.similarity import (
    plain_cosines,
    scale_to_unit_variance,
    subtract_mean,
)
from vllm_autoprune.tpdsl.atoms.signals import pick_confidence
from vllm_autoprune.tpdsl.registry import (
    AtomCall,
    OneOf,
    add_clauses,
    added,
    atom,
    run,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _ProductFusion(AtomCall):
    eps: float = Field(
        1e-3,
        ge=1e-6,
        le=0.05,
        description="floor of a signal, so that a single 0 does not make the product 0",
    )
    normalised: bool = added(
        False,
        description="divide the weights by their sum, and min-max normalise the product",
    )

    def describe(self, doc: str) -> str:
        """How the product is scaled."""
        clause = "; weights are divided by their sum, the product is normalised"
        return add_clauses(doc, {clause: self.normalised})


class _ConfidenceFusion(_ProductFusion):
    beta: float = Field(
        0.5,
        ge=0.0,
        le=4.0,
        description="factor 1 + beta for the base policy's first pick, falling to 1 + beta / K for "
        "its last, 1 for other tokens",
    )

    def describe(self, doc: str) -> str:
        """Whether early picks gain, and how the product is scaled."""
        if self.beta == 0:
            doc = "Product of the signals, each raised to the power of its weight."
        return super().describe(doc)


Fusion = Annotated[AtomCall, OneOf("score_fusion")]


@atom("score_fusion")
def _weighted_sum_fusion(
    call: AtomCall, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Weighted sum of the signals."""
    # Added one by one: a reduction over a stacked axis rounds differently alone and in a batch.
    total = torch.zeros_like(signals[0])
    for signal, weight in zip(signals, weights, strict=True):
        total = total + weight * signal
    return total


@atom("score_fusion", _ProductFusion)
def _weighted_product_fusion(
    call: _ProductFusion,
    signals: Sequence[Tensor],
    weights: Sequence[float],
    picks: Tensor,
) -> Tensor:
    """Product of the signals, each raised to the power of its weight."""
    total = torch.zeros_like(signals[0])
    for signal, weight in zip(signals, weights, strict=True):
        total = total + weight * signal.clamp_min(call.eps).log()
    return (
        min_max_normalise((total / sum(weights)).exp())
        if call.normalised
        else total.exp()
    )


@atom("score_fusion", _ConfidenceFusion)
def _reference_confidence_weighted_product_fusion(
    call: _ConfidenceFusion,
    signals: Sequence[Tensor],
    weights: Sequence[float],
    picks: Tensor,
) -> Tensor:
    """Weighted product, increased for tokens that the base policy picked early."""
    gain = 1 + call.beta * pick_confidence(picks, signals[0].shape[1])
    return _weighted_product_fusion(call, signals, weights, picks) * gain


def run_fusion(
    call: AtomCall, signals: Sequence[Tensor], weights: Sequence[float], picks: Tensor
) -> Tensor:
    """Min-max normalise signals ``(B, N)`` and fuse them into token quality g ``(B, N)`` >= 0."""
    scaled = min_max_normalise(torch.stack(list(signals), dim=1)).unbind(dim=1)
    return run(Tensor, call, scaled, weights, picks)


def sharpen(quality: Tensor, theta: float | None) -> Tensor:
    """exp(alpha q) with alpha = theta / (2 (1 - theta)); q itself if theta is None."""
    return quality if theta is None else torch.exp(theta / (2 * (1 - theta)) * quality)


@dataclass(frozen=True, slots=True)
class Kernel:
    """L = diag(quality) similarity diag(quality): ``(B, N, N)`` and ``(B, N)``, float32."""

    similarity: Tensor
    quality: Tensor

    @classmethod
    def conditional(
        cls,
        tokens: VisualTokens,
        r: Tensor,
        eps: float = 1e-6,
        theta: float | None = None,
    ) -> Kernel:
        """Kernel diag(r) S diag(r) of cosines S, with r ``(B, N)`` min-max normalised."""
        return cls(tokens.cosine, sharpen(min_max_normalise(r, eps), theta))


class KernelCall(AtomCall):
    """A similarity kernel."""

    @property
    def reads_quality(self) -> bool:
        """Whether the kernel is scaled by token quality."""
        return True


class _CosineKernel(KernelCall):
    clamp_negative: bool = Field(False, description="count negative cosines as 0")
    shifted: bool = added(False, description="(1 + cosine) / 2, within 0 to 1")

    @property
    def reads_quality(self) -> bool:
        """False: cosines alone."""
        return False

    def describe(self, doc: str) -> str:
        """The range of cosines."""
        clauses = {
            "; negative ones count as 0": self.clamp_negative,
            "; as (1 + cosine) / 2": self.shifted,
        }
        return add_clauses(doc, clauses)


class _ConditionalKernel(KernelCall):
    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="weight exp(theta q / (2 - 2 theta)) of the normalised quality q; null: q",
    )
    eps: float = Field(
        1e-6,
        ge=1e-8,
        le=1e-3,
        description="in the normalised quality (quality - minimum + eps) / (maximum - minimum), so "
        "that it is above 0 for every token",
    )

    def describe(self, doc: str) -> str:
        """How quality is weighted."""
        weight = "the normalised token quality"
        if self.theta is None:
            return doc
        return doc.replace(weight, f"an exponential of {weight}")


class _CentredKernel(KernelCall):
    """Parameters of centred_cosine_kernel."""

    scale_variance: bool = Field(
        False, description="divide every channel by its deviation in the image first"
    )
    weighted: bool = Field(
        False, description="scale by the normalised token quality on both sides"
    )

    @property
    def reads_quality(self) -> bool:
        """Whether it is weighted."""
        return self.weighted

    def describe(self, doc: str) -> str:
        """What is done to channels before, and whether quality counts."""
        clauses = {
            ", of channels divided by their deviation": self.scale_variance,
            ", scaled on both sides by token quality": self.weighted,
        }
        return add_clauses(doc, clauses)


SimilarityKernel = Annotated[KernelCall, OneOf("similarity_kernel", KernelCall)]


@atom("similarity_kernel", _CosineKernel)
def _pairwise_cosine_kernel(
    call: _CosineKernel, tokens: VisualTokens, g: Tensor
) -> Kernel:
    """Cosine of token features, independent of token quality."""
    cosine = tokens.cosine.clamp_min(0) if call.clamp_negative else tokens.cosine
    if call.shifted:
        cosine = ((1 + cosine) / 2).clamp(0, 1)
    return Kernel(cosine, torch.ones_like(g))


@atom("similarity_kernel", _ConditionalKernel)
def _runtime_conditional_similarity_kernel(
    call: _ConditionalKernel, tokens: VisualTokens, g: Tensor
) -> Kernel:
    """Cosine of token features, scaled on both sides by the normalised token quality."""
    return Kernel.conditional(tokens, g, call.eps, call.theta)


@atom("similarity_kernel", _CentredKernel, origin="extension", cost=25.1)
def _centred_cosine_kernel(
    call: _CentredKernel, tokens: VisualTokens, g: Tensor
) -> Kernel:
    """Cosine of token features less the mean token of their tile (Cen-Prune's similarity)."""
    rows = tokens.by_tile(tokens.features).float()
    if call.scale_variance:
        rows = scale_to_unit_variance(rows)
    similarity = plain_cosines(tokens.by_image(subtract_mean(rows, tokens.grid.tiles)))
    return Kernel(
        similarity, min_max_normalise(g, 1e-6) if call.weighted else torch.ones_like(g)
    )
