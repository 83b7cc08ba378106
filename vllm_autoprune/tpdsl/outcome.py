"""What a policy makes of B images: first which tokens it keeps, then their rows.

Knows nothing about how tokens are chosen or rows are made.

K = P + E rows an image: P tokens that are kept, E rows of the base policy that stand for no
single token (none, for most policies).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_autoprune.tpdsl.base_policy import Reference

FALLBACKS = ("none", "reference", "uniform")
"""Meaning of a fallback code: the state held, its scores failed, its base failed too."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which tokens are kept, and what their rows are made from.

    indices ``(B, P)`` ascending; reference as the base policy gave it; fallback ``(B,)`` uint8,
    see :data:`FALLBACKS`; quality ``(B, N)`` g, or None where the state never scores.
    """

    indices: Tensor
    reference: Reference
    fallback: Tensor
    quality: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Refined:
    """T_v* of B images.

    features ``(B, K, D)``, the E rows without a token last; indices ``(B, P)``, the token of each
    of the other rows; reference ``(B, P)`` in pick order; exchanged ``(B,)`` replaced reference
    tokens; fallback and quality as in :class:`Chosen`.
    """

    features: Tensor
    indices: Tensor
    reference: Tensor
    exchanged: Tensor
    fallback: Tensor
    quality: Tensor | None

    @property
    def extra(self) -> int:
        """E, the rows that stand for no single token."""
        return self.features.shape[1] - self.reference.shape[1]
