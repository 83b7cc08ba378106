"""Results of a policy on B images: the kept tokens, and the rows that represent them.

K = P + E rows per image: P kept tokens, and E rows of the base policy that no single token stands
for (0 for most policies).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_autoprune.tpdsl.base_policy import ReferenceSelection

FALLBACKS = ("none", "reference", "uniform")
"""Meaning of a fallback code: 0, the state was applied; 1, the base policy's selection is kept,
because the scores were not finite; 2, evenly spaced tokens are kept, because the inputs of the base
policy were not finite either."""


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Kept tokens of B images.

    indices ``(B, P)`` ascending; reference is the base policy's selection; fallback ``(B,)`` uint8,
    see :data:`FALLBACKS`; quality ``(B, N)`` is g, or None if the policy reads no scores;
    mergeable ``(B, N)`` bool marks the tokens that reassembly may merge into kept ones, None: all
    that are not kept.
    """

    indices: Tensor
    reference: ReferenceSelection
    fallback: Tensor
    quality: Tensor | None = None
    mergeable: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RefinedTokens:
    """Refined visual tokens T_v* of B images.

    features ``(B, K, D)``, the E extra rows last; indices ``(B, P)``, the token of each other row;
    reference ``(B, P)`` in pick order; exchanged ``(B,)``, the number of reference tokens that were
    replaced; fallback and quality as in :class:`TokenSelection`.
    """

    features: Tensor
    indices: Tensor
    reference: Tensor
    exchanged: Tensor
    fallback: Tensor
    quality: Tensor | None

    @property
    def extra(self) -> int:
        """E, the number of rows that no single token stands for."""
        return self.features.shape[1] - self.reference.shape[1]
