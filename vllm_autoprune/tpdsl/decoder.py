"""DecoderPrefix: a :class:`LanguagePrefix` from the callables of decoder layers, in plain torch.

Knows nothing about whose layers they are: a transformers model, a served one, or a test's.

Sequences run one by one and without padding, so that an image gets the same bits alone and in a
batch, and memory is that of one sequence. Causal attention; the text's rows of it are made with a
softmax in float32.

One sequence has l = S + N + lt positions, lt the text tokens that are no padding; D is the
model's width, H query heads share Hk key heads, d is their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.tpdsl.language import attention_rows

Rows = Callable[[Tensor], Tensor]
"""``(l, ...) -> (l, ...)``, row by row."""

Heads = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Normed rows ``(l, D)`` to queries ``(H, l, d)``, keys and values ``(Hk, l, d)``, rotated."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm decoder layer: x + output(attention(input_norm x)), then the same by its MLP."""

    input_norm: Rows
    heads: Heads
    output: Rows
    post_norm: Rows
    feed_forward: Rows


class DecoderPrefix:
    """B sequences [before, image, instruction] through as many layers as are asked for.

    embeddings ``(B, L, D)`` enter layer 0; start is S; text ``(B, Lt)`` is false for padding, on
    the right; rows of padding are zero in everything that comes out. ``norm`` is the model's final
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
        """Layers that were given."""
        return len(self._decoder)

    def embeddings(self) -> Tensor:
        """``(B, L, D)``: what enters layer 0."""
        return self._embeddings

    def states(self, layer: int) -> Tensor:
        """``(B, L, D)``: what leaves ``layer``, before any final norm."""
        return self._padded([one.enters(layer + 1) for one in self._rows], dim=0)

    def normed(self, layer: int) -> Tensor:
        """``(B, L, D)``: :meth:`states` after the model's final norm."""
        return self._padded([self._norm(one.enters(layer + 1)) for one in self._rows], dim=0)

    def keys(self, layer: int) -> Tensor:
        """``(B, Hk, L, d)``: the layer's attention keys, with rotary positions."""
        return self._padded([one.heads(layer)[1] for one in self._rows], dim=1)

    def attention(self, layer: int) -> Tensor:
        """``(B, H, Lt, L)`` float32: attention probabilities of the text tokens' rows."""
        made = []
        before = self._embeddings.shape[1] - self.text.shape[1]
        for one in self._rows:
            query, key, _ = one.heads(layer)
            rows = attention_rows(query[:, before:], key)
            missing = self._embeddings.shape[1] - key.shape[1]
            made.append(functional.pad(rows, (0, missing, 0, missing)))
        return torch.stack(made)

    def _padded(self, parts: list[Tensor], dim: int) -> Tensor:
        """Parts of unequal length along ``dim`` as one tensor, zero where text is padding."""
        length = self._embeddings.shape[1]
        whole = []
        for part in parts:
            shape = list(part.shape)
            shape[dim] = length - shape[dim]
            whole.append(torch.cat([part, part.new_zeros(shape)], dim=dim))
        return torch.stack(whole)


class _Sequence:
    """One sequence without padding; what was computed once is kept."""

    def __init__(self, layers: Sequence[DecoderLayer], embeddings: Tensor) -> None:
        self._layers = layers
        self._entering = [embeddings]
        self._heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def enters(self, layer: int) -> Tensor:
        """``(l, D)``: what enters ``layer``, after running those before it."""
        while len(self._entering) <= layer:
            self._entering.append(self._through(len(self._entering) - 1))
        return self._entering[layer]

    def heads(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``layer``."""
        if layer not in self._heads:
            block = self._layers[layer]
            self._heads[layer] = block.heads(block.input_norm(self.enters(layer)))
        return self._heads[layer]

    def _through(self, layer: int) -> Tensor:
        block, entering = self._layers[layer], self.enters(layer)
        query, key, value = (part[None] for part in self.heads(layer))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        between = entering + block.output(mixed[0].transpose(0, 1).flatten(1))
        return between + block.feed_forward(block.post_norm(between))
