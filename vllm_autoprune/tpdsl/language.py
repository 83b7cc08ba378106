"""LanguagePrefix: the language model's first layers over [image, instruction], before prefill.

Knows nothing about weights: a served model or a recording stands behind the protocol.

Policies that were published as pruning *inside* the language model read it to select before the
model runs, so that removed tokens never enter the KV cache.

L = S + N + Lt: S tokens before the image, N visual tokens, Lt text tokens after it, padded on the
right; H query heads, Hk key heads, d their width. Layers count from 0.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LanguagePrefix(Protocol):
    """B sequences [before, image, instruction]; each call computes no more layers than it needs."""

    @property
    def start(self) -> int:
        """S, the position of the first visual token."""

    @property
    def text(self) -> Tensor:
        """``(B, Lt)`` bool, false for padding; at least one true in every row."""

    def embeddings(self) -> Tensor:
        """``(B, L, D)``: what enters layer 0."""

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``: what leaves ``layer``, before any final norm."""

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: :meth:`states` after the model's final norm."""

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: the layer's attention keys, with rotary positions."""

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens' rows."""
