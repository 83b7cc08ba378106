"""LanguagePrefix: hidden states of the language model's first layers over [image, instruction].

Base policies that were published as pruning *inside* the language model read these to select
tokens before prefill, so that removed tokens never enter the KV cache.

Shapes: L = S + N + Lt positions: S tokens before the image, N visual tokens and Lt text tokens
after it, padded on the right; H query heads, Hk key heads, d their width. Layers count from 0.
:class:`DecoderPrefix` runs sequences one by one without padding, so that results are bit-identical
alone and in a batch and memory use is that of one sequence: l = S + N + lt positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as functional
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
    """A :class:`LanguagePrefix` of recorded tensors by method name, returned for every layer.

    Shapes as in the protocol. Reading a tensor that was not recorded raises SelectionError.
    """

    start: int
    text: Tensor
    layers: int = 32
    recorded: Mapping[str, Tensor] = field(default_factory=dict)

    def embeddings(self) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return self._read("embeddings")

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return self._read("states")

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``, as recorded."""
        return self._read("normed")

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``, as recorded."""
        return self._read("keys")

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)``, as recorded."""
        return self._read("attention")

    def _read(self, name: str) -> Tensor:
        if name not in self.recorded:
            raise SelectionError(f"the recorded language prefix has no {name}: record them")
        return self.recorded[name]


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


Rows = Callable[[Tensor], Tensor]
"""``(l, ...) -> (l, ...)``, row by row."""

Heads = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Normalised rows ``(l, D)`` to queries ``(H, l, d)``, keys and values ``(Hk, l, d)`` with RoPE."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm decoder layer: attention and feed-forward blocks, each with a residual."""

    input_norm: Rows
    heads: Heads
    output: Rows
    post_norm: Rows
    feed_forward: Rows


class DecoderPrefix:
    """Hidden states of B sequences [prefix, image, instruction], computed layer by layer on demand.

    embeddings ``(B, L, D)`` are the input of layer 0; start is S; text ``(B, Lt)`` is false for
    padding, which is on the right and has zero rows in every output. ``norm`` is the model's final
    norm.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Rows,
        embeddings: Tensor,
        start: int,
        text: Tensor,
    ) -> None:
        self._decoder = layers
        self._norm = norm
        self._embeddings = embeddings
        self.start = start
        self.text = text
        visible = embeddings.shape[1] - text.shape[1]
        counts = [visible + int(count) for count in text.sum(dim=1).tolist()]
        self._sequences = [
            _Sequence(layers, rows[:count]) for rows, count in zip(embeddings, counts, strict=True)
        ]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._decoder)

    def embeddings(self) -> Tensor:
        """``(B, L, D)``: input of layer 0."""
        return self._embeddings

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer``, before the final norm."""
        return self._padded([rows.input_of(layer + 1) for rows in self._sequences], dim=0)

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer`` after the model's final norm."""
        states = [self._norm(rows.input_of(layer + 1)) for rows in self._sequences]
        return self._padded(states, dim=0)

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: attention keys of the layer, after RoPE."""
        return self._padded([rows.heads(layer)[1] for rows in self._sequences], dim=1)

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens as queries."""
        attention, length = [], self._embeddings.shape[1]
        for sequence in self._sequences:
            query, key, _ = sequence.heads(layer)
            rows = attention_rows(query[:, length - self.text.shape[1] :], key)
            missing = length - key.shape[1]
            attention.append(functional.pad(rows, (0, missing, 0, missing)))
        return torch.stack(attention)

    def _padded(self, parts: list[Tensor], dim: int) -> Tensor:
        """Stack parts of unequal length along ``dim``, padded with zeros on the right."""
        behind = parts[0].dim() - 1 - dim
        length = self._embeddings.shape[1]
        return torch.stack(
            [
                functional.pad(part, (0, 0) * behind + (0, length - part.shape[dim]))
                for part in parts
            ]
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


MOST_LAYERS = 128
"""Largest layer that a parameter may name; the served model may have fewer layers."""


def require_layer(language: LanguagePrefix, layer: int) -> int:
    """``layer``; raises :class:`SelectionError` if the language model has no such layer."""
    if not 0 <= layer < language.layers:
        raise SelectionError(
            f"the base policy reads layer {layer}, but this language model has layers 0 to "
            f"{language.layers - 1}: set the policy's parameter 'layer' to a smaller one"
        )
    return layer


def visual_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """Slice the N visual positions of ``(..., L, ...)``."""
    return values.narrow(dim, language.start, count)


def text_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """Slice the Lt text positions after the image of ``(..., L, ...)``."""
    return values.narrow(dim, language.start + count, language.text.shape[1])


def last_token_attention(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """Attention of the last text token, averaged over heads, ``(B, N)`` float32."""
    rows = language.attention(require_layer(language, layer)).float()
    positions = torch.arange(language.text.shape[1], device=rows.device)
    last = torch.where(language.text, positions, 0).amax(dim=1)  # padding is on the right
    where = last[:, None, None, None].expand(-1, rows.shape[1], 1, rows.shape[3])
    return visual_span(language, rows.gather(2, where)[:, :, 0].mean(dim=1), count)
