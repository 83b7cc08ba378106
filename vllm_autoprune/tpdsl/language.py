"""LanguagePrefix: the language model's first layers over [image, instruction], before prefill.

Knows nothing about weights: a served model or a recording stands behind the protocol.

Policies that were published as pruning *inside* the language model read it to select before the
model runs, so that removed tokens never enter the KV cache.

L = S + N + Lt: S tokens before the image, N visual tokens, Lt text tokens after it, padded on the
right; H query heads, Hk key heads, d their width. Layers count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError


class LanguagePrefix(Protocol):
    """B sequences [before, image, instruction]; each call computes no more layers than it needs."""

    @property
    def layers(self) -> int:
        """Layers that the whole language model has."""

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


@dataclass(frozen=True)
class RecordedPrefix:
    """A :class:`LanguagePrefix` from tensors of one layer, given out whichever layer is asked for.

    Shapes as in the protocol. A tensor that was not recorded is an error only when it is read.
    """

    start: int
    text: Tensor
    layers: int = 32
    recorded_embeddings: Tensor | None = None
    recorded_states: Tensor | None = None
    recorded_normed: Tensor | None = None
    recorded_keys: Tensor | None = None
    recorded_attention: Tensor | None = None

    def embeddings(self) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return _recorded(self.recorded_embeddings, "embeddings")

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return _recorded(self.recorded_states, "states")

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return _recorded(self.recorded_normed, "normed states")

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``, as recorded."""
        return _recorded(self.recorded_keys, "keys")

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)``, as recorded."""
        return _recorded(self.recorded_attention, "attention")


def attention_rows(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention of the last Q positions, ``(..., H, Q, L)`` float32.

    queries ``(..., H, Q, d)`` and keys ``(..., Hk, L, d)``, both with rotary positions; key heads
    are shared by neighbouring query heads where there are fewer of them.
    """
    asked, length = queries.shape[-2], keys.shape[-2]
    shared = queries.shape[-3] // keys.shape[-3]
    known = keys.float().repeat_interleave(shared, dim=-3)
    scores = queries.float() @ known.transpose(-1, -2) * queries.shape[-1] ** -0.5
    later = torch.ones(asked, length, dtype=torch.bool, device=keys.device)
    allowed = scores.masked_fill(later.triu(length - asked + 1), -torch.inf)
    rows: Tensor = allowed.softmax(dim=-1)
    return rows


def _recorded(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise SelectionError(f"this recording of a language model holds no {what}: record them too")
    return tensor
