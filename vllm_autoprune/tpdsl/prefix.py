"""LanguagePrefix: hidden states of the language model's first layers over [image, instruction].

Base policies that were published as pruning *inside* the language model read these to select
tokens before prefill, so that removed tokens never enter the KV cache.

Shapes: L = S + N + Lt positions: S tokens before the image, N visual tokens and Lt text tokens
after it, padded on the right; H query heads, Hk key heads, d their width. Layers count from 0.
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
"""What a base policy reads of a layer; the embeddings are of none."""


class LanguagePrefix(ABC):
    """Hidden states of B sequences [prefix, image, instruction]; layers are computed on demand.

    layers is their number in the whole language model; start is S, the position of the first visual
    token; text ``(B, Lt)`` bool is false for padding, with at least one true in every row. Reading
    a layer that the model does not have raises :class:`SelectionError`.
    """

    layers: int
    start: int
    text: Tensor

    @abstractmethod
    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """One of the outputs below; all but the embeddings are of an existing layer."""

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
        """Attention of the last text token to the N, averaged over heads, ``(B, N)`` float32."""
        rows = self.attention(layer).float()
        positions = torch.arange(self.text.shape[1], device=rows.device)
        last = torch.where(self.text, positions, 0).amax(dim=1)  # padding is on the right
        where = last[:, None, None, None].expand(-1, rows.shape[1], 1, rows.shape[3])
        return self.visual(rows.gather(2, where)[:, :, 0].mean(dim=1), count)

    def visual(self, values: Tensor, count: int, dim: int = -1) -> Tensor:
        """Slice the N visual positions of ``(..., L, ...)``."""
        return values.narrow(dim, self.start, count)

    def textual(self, values: Tensor, count: int, dim: int = -1) -> Tensor:
        """Slice the Lt text positions after the N of the image of ``(..., L, ...)``."""
        return values.narrow(dim, self.start + count, self.text.shape[1])

    def _existing(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise SelectionError(
                f"the base policy reads layer {layer}, but this language model has layers 0 to "
                f"{self.layers - 1}: set the policy's parameter 'layer' to a smaller one"
            )
        return layer


@dataclass(frozen=True)
class RecordedPrefix(LanguagePrefix):
    """Recorded tensors by the name of their method, returned for every layer.

    Reading a tensor that was not recorded raises :class:`SelectionError`.
    """

    start: int
    text: Tensor
    layers: int = 32
    recorded: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """The tensor recorded under this name."""
        if output not in self.recorded:
            raise SelectionError(f"the recorded language prefix has no {output}: record them")
        return self.recorded[output]


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


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm decoder layer: attention and feed-forward blocks, each with a residual.

    All work row by row, ``(l, ...) -> (l, ...)``; heads turns normalised rows ``(l, D)`` into
    queries ``(H, l, d)``, and keys and values ``(Hk, l, d)``, with RoPE.
    """

    input_norm: Callable[[Tensor], Tensor]
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    feed_forward: Callable[[Tensor], Tensor]


class DecoderPrefix(LanguagePrefix):
    """Sequences that run layer by layer, on demand.

    embeddings ``(B, L, D)`` are the input of layer 0, ``norm`` is the model's final norm. They run
    one by one without padding, l = S + N + lt positions each, so that results are bit-identical
    alone and in a batch and memory use is that of one sequence; padding has zero rows in every
    output.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Callable[[Tensor], Tensor],
        embeddings: Tensor,
        start: int,
        text: Tensor,
    ) -> None:
        self.layers, self.start, self.text = len(layers), start, text
        self._norm = norm
        self._embeddings = embeddings
        visible = embeddings.shape[1] - text.shape[1]
        counts = [visible + int(count) for count in text.sum(dim=1).tolist()]
        self._sequences = [
            _Sequence(layers, rows[:count]) for rows, count in zip(embeddings, counts, strict=True)
        ]

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """The output of all sequences, padded with zeros on the right."""
        length = self._embeddings.shape[1]
        if output == "embeddings":
            return self._embeddings
        if output == "attention":
            attention = []
            for sequence in self._sequences:
                query, key, _ = sequence.heads(layer)
                rows = attention_rows(query[:, length - self.text.shape[1] :], key)
                missing = length - key.shape[1]
                attention.append(functional.pad(rows, (0, missing, 0, missing)))
            return torch.stack(attention)
        if output == "keys":
            parts = [sequence.heads(layer)[1] for sequence in self._sequences]
        else:
            parts = [sequence.input_of(layer + 1) for sequence in self._sequences]
            parts = [self._norm(rows) for rows in parts] if output == "normed" else parts
        # The last axis is a width; positions are the one before it.
        return torch.stack(
            [functional.pad(part, (0, 0, 0, length - part.shape[-2])) for part in parts]
        )


class _Sequence:
    """One sequence without padding; computed layers are cached."""

    def __init__(self, layers: Sequence[DecoderLayer], embeddings: Tensor) -> None:
        self._layers = layers
        self._inputs = [embeddings]
        self._heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def input_of(self, layer: int) -> Tensor:
        """``(l, D)``: input of ``layer``; runs the layers before it if needed."""
        while len(self._inputs) <= layer:
            done = len(self._inputs) - 1
            block, rows = self._layers[done], self._inputs[done]
            query, key, value = (part[None] for part in self.heads(done))
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
            rows = rows + block.output(mixed[0].transpose(0, 1).flatten(1))
            self._inputs.append(rows + block.feed_forward(block.post_norm(rows)))
        return self._inputs[layer]

    def heads(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``layer``."""
        if layer not in self._heads:
            block = self._layers[layer]
            self._heads[layer] = block.heads(block.input_norm(self.input_of(layer)))
        return self._heads[layer]
