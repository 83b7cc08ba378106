"""DecoderPrefix: a :class:`LanguagePrefix` computed from decoder layers given as callables.

Sequences run one by one without padding, so that results are bit-identical alone and in a batch
and memory use is that of one sequence. Attention is causal; the attention rows of the text are
computed with a float32 softmax.

Shapes: one sequence has l = S + N + lt positions, lt of them text tokens (without padding); D is
the model's width; H query heads share Hk key heads of width d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.tpdsl.language_prefix import attention_rows

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
        self._rows = [
            _Sequence(layers, one[:count]) for one, count in zip(embeddings, counts, strict=True)
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
        return self._padded([one.input_of(layer + 1) for one in self._rows], dim=0)

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: output of ``layer`` after the model's final norm."""
        return self._padded([self._norm(one.input_of(layer + 1)) for one in self._rows], dim=0)

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: attention keys of the layer, after RoPE."""
        return self._padded([one.heads(layer)[1] for one in self._rows], dim=1)

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens as queries."""
        attention = []
        before = self._embeddings.shape[1] - self.text.shape[1]
        for one in self._rows:
            query, key, _ = one.heads(layer)
            rows = attention_rows(query[:, before:], key)
            missing = self._embeddings.shape[1] - key.shape[1]
            attention.append(functional.pad(rows, (0, missing, 0, missing)))
        return torch.stack(attention)

    def _padded(self, parts: list[Tensor], dim: int) -> Tensor:
        """Stack parts of unequal length along ``dim``, padded with zeros on the right."""
        length = self._embeddings.shape[1]
        whole = []
        for part in parts:
            shape = list(part.shape)
            shape[dim] = length - shape[dim]
            whole.append(torch.cat([part, part.new_zeros(shape)], dim=dim))
        return torch.stack(whole)


class _Sequence:
    """One sequence without padding; computed layers are cached."""

    def __init__(self, layers: Sequence[DecoderLayer], embeddings: Tensor) -> None:
        self._layers = layers
        self._inputs = [embeddings]
        self._heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def input_of(self, layer: int) -> Tensor:
        """``(l, D)``: input of ``layer``; runs the layers before it if needed."""
        while len(self._inputs) <= layer:
            self._inputs.append(self._run_layer(len(self._inputs) - 1))
        return self._inputs[layer]

    def heads(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``layer``."""
        if layer not in self._heads:
            block = self._layers[layer]
            self._heads[layer] = block.heads(block.input_norm(self.input_of(layer)))
        return self._heads[layer]

    def _run_layer(self, layer: int) -> Tensor:
        block, rows = self._layers[layer], self.input_of(layer)
        query, key, value = (part[None] for part in self.heads(layer))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        rows = rows + block.output(mixed[0].transpose(0, 1).flatten(1))
        return rows + block.feed_forward(block.post_norm(rows))
