"""LanguagePrefix: hidden states of the language model's first layers over [image, instruction].

Base policies that were published as pruning *inside* the language model read these to select
tokens before prefill, so that removed tokens never enter the KV cache.

Shapes: L = S + N + Lt positions: S tokens before the image, N visual tokens and Lt text tokens
after it, padded on the right; H query heads, Hk key heads, d their width. Layers count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError


class LanguagePrefix(Protocol):
    """Hidden states of B sequences [prefix, image, instruction]; layers are computed on demand."""

    @property
    def layers(self) -> int:
        """Number of layers of the whole language model."""

    @property
    def start(self) -> int:
        """S, the position of the first visual token."""

    @property
    def text(self) -> Tensor:
        """``(B, Lt)`` bool, false for padding; at least one true in every row."""

    def embeddings(self) -> Tensor:
        """``(B, L, D)``: input of layer 0."""

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer``, before the final norm."""

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer`` after the model's final norm."""

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: attention keys of the layer, after RoPE."""

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens as queries."""


@dataclass(frozen=True)
class RecordedPrefix:
    """A :class:`LanguagePrefix` of recorded tensors, which are returned for every layer.

    Shapes as in the protocol. Reading a tensor that was not recorded raises SelectionError.
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
    """Causal attention probabilities of the last Q positions, ``(..., H, Q, L)`` float32.

    queries ``(..., H, Q, d)`` and keys ``(..., Hk, L, d)``, both after RoPE; with Hk < H,
    neighbouring query heads share a key head (grouped-query attention).
    """
    rows, length = queries.shape[-2], keys.shape[-2]
    group = queries.shape[-3] // keys.shape[-3]
    repeated = keys.float().repeat_interleave(group, dim=-3)
    scores = queries.float() @ repeated.transpose(-1, -2) * queries.shape[-1] ** -0.5
    later = torch.ones(rows, length, dtype=torch.bool, device=keys.device)
    masked = scores.masked_fill(later.triu(length - rows + 1), -torch.inf)
    probabilities: Tensor = masked.softmax(dim=-1)
    return probabilities


def _recorded(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise SelectionError(f"the recorded language prefix has no {what}: record them")
    return tensor
