"""LanguagePrefix: hidden states of the language model's first layers over [image, instruction].

Base policies that were published as pruning *inside* the language model read these states to select
tokens before prefill, so that removed tokens never enter the KV cache.

Shapes: a sequence has L = S + N + Lt positions: S tokens before the image, N visual tokens and Lt
text tokens after it, padded on the right. There are H query heads and Hk key heads of width d.
Layers count from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.errors import SelectionError

MOST_LAYERS = 128
"""Largest layer that a parameter may name; the served model may have fewer layers."""

PrefixOutput = Literal["embeddings", "states", "normed", "keys", "attention"]
"""What a base policy reads: embeddings belong to no layer, all others to one layer."""


class LanguagePrefix(ABC):
    """Hidden states of B sequences [prefix, image, instruction]; layers are computed on demand.

    layers is the number of layers of the whole language model. start is S, the position of the
    first visual token. text ``(B, Lt)`` bool is false for padding and true at least once in every
    row. Reading a layer that the model does not have raises :class:`SelectionError`.
    """

    layers: int
    start: int
    text: Tensor

    @abstractmethod
    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """Compute one of the outputs below; all but the embeddings need an existing layer."""

    def embeddings(self) -> Tensor:
        """``(B, L, D)``: input of layer 0."""
        return self.read("embeddings", 0)

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer``, before the final norm."""
        return self.read("states", self._existing(layer))

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer`` after the model's final norm."""
        return self.read("normed", self._existing(layer))

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: attention keys of the layer, after RoPE."""
        return self.read("keys", self._existing(layer))

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens as queries."""
        return self.read("attention", self._existing(layer))

    def last_token_attention(self, layer: int, count: int) -> Tensor:
        """Attention ``(B, N)`` float32 of the last text token, averaged over heads."""
        rows = self.attention(layer).float()
        positions = torch.arange(self.text.shape[1], device=rows.device)
        last = torch.where(self.text, positions, 0).amax(
            dim=1
        )  # padding is on the right
        where = last[:, None, None, None].expand(-1, rows.shape[1], 1, rows.shape[3])
        return self.visual(rows.gather(2, where)[:, :, 0].mean(dim=1), count)

    def visual(self, values: Tensor, count: int, dim: int = -1) -> Tensor:
        """Slice the N visual positions of ``(..., L, ...)``."""
        return values.narrow(dim, self.start, count)

    def textual(self, values: Tensor, count: int, dim: int = -1) -> Tensor:
        """Slice the Lt text positions, which follow the image, of ``(..., L, ...)``."""
        return values.narrow(dim, self.start + count, self.text.shape[1])

    def _existing(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise SelectionError.of(
                "/base_policy/params/layer",
                f"the base policy reads layer {layer}, but this language model has layers 0 to "
                f"{self.layers - 1}",
                "set the policy's parameter 'layer' to a smaller one",
            )
        return layer


@dataclass(frozen=True)
class RecordedPrefix(LanguagePrefix):
    """Recorded tensors by the name of the method that returns them, the same for every layer.

    Reading a tensor that was not recorded raises :class:`SelectionError`.
    """

    start: int
    text: Tensor
    layers: int = 32
    recorded: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """The tensor recorded under this name."""
        if output not in self.recorded:
            raise SelectionError.of(
                "RecordedPrefix.recorded", f"has no {output}", "record them"
            )
        return self.recorded[output]


def attention_rows(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention probabilities of the last Q positions, ``(..., H, Q, L)`` float32.

    queries ``(..., H, Q, d)`` and keys ``(..., Hk, L, d)``, both after RoPE; with Hk < H,
    neighbouring query heads share a key head (grouped-query attention).
    """
    rows = queries.shape[-2]
    length = keys.shape[-2]
    group = queries.shape[-3] // keys.shape[-3]
    repeated = keys.float().repeat_interleave(group, dim=-3)
    scores = queries.float() @ repeated.transpose(-1, -2) * queries.shape[-1] ** -0.5
    later = torch.ones(rows, length, dtype=torch.bool, device=keys.device)
    masked = scores.masked_fill(later.triu(length - rows + 1), -torch.inf)
    probabilities: Tensor = masked.softmax(dim=-1)
    return probabilities


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm decoder layer: attention and feed-forward blocks, each with a residual.

    All callables work row by row, ``(L, ...) -> (L, ...)``. ``heads`` maps normalised rows ``(L,
    D)`` to queries ``(H, L, d)``, keys and values ``(Hk, L, d)``, with RoPE applied.
    """

    input_norm: Callable[[Tensor], Tensor]
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    feed_forward: Callable[[Tensor], Tensor]


class DecoderPrefix(LanguagePrefix):
    """A single sequence that runs layer by layer, on demand; each layer is computed once.

    sequence ``(L, D)`` is the input of layer 0, and its last ``words`` rows are the text; ``norm``
    is the model's final norm. Running images one at a time gives an image the same bits alone and
    beside others, and needs memory for one sequence only.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Callable[[Tensor], Tensor],
        sequence: Tensor,
        start: int,
        words: int,
    ) -> None:
        self.layers = len(layers)
        self.start = start
        self.text = torch.ones(1, words, dtype=torch.bool, device=sequence.device)
        self._decoder = layers
        self._norm = norm
        self._inputs = [sequence]
        self._heads: list[tuple[Tensor, Tensor, Tensor]] = []

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """One output ``(1, ...)`` of the sequence."""
        if output == "embeddings":
            return self._inputs[0][None]
        if output in ("states", "normed"):
            states = self._input_of(layer + 1)
            return (states if output == "states" else self._norm(states))[None]
        query, key, _ = self._heads_of(layer)
        if output == "keys":
            return key[None]
        return attention_rows(query[:, -self.text.shape[1] :], key)[None]

    def _input_of(self, layer: int) -> Tensor:
        """``(L, D)``: input of ``layer``; runs the layers before it if needed."""
        while len(self._inputs) <= layer:
            block = self._decoder[len(self._inputs) - 1]
            rows = self._inputs[-1]
            query, key, value = self._heads_of(len(self._inputs) - 1)
            mixed = functional.scaled_dot_product_attention(
                query[None],
                key[None],
                value[None],
                is_causal=True,
                enable_gqa=len(query) != len(key),
            )
            rows = rows + block.output(mixed[0].transpose(0, 1).flatten(1))
            self._inputs.append(rows + block.feed_forward(block.post_norm(rows)))
        return self._inputs[layer]

    def _heads_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``layer``."""
        while len(self._heads) <= layer:
            index = len(self._heads)
            block = self._decoder[index]
            self._heads.append(block.heads(block.input_norm(self._input_of(index))))
        return self._heads[layer]
