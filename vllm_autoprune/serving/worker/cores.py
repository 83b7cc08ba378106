"""Kept tokens of images: what was chosen first for an item, and cores for further questions.

KV blocks stay in vLLM's prefix cache longer than the image's features stay here. The indices of the
tokens that they were made of are kept for longer too: an image that is encoded again keeps those
tokens, and what is chosen after them leaves out the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_autoprune.ops.dpp_torch import Conditioned

MAX_CORES = 8192
"""Maximum number of cores, and of other items, whose indices are kept."""

MAX_INDICES = MAX_CORES * 160
"""Maximum number of indices of all items, 10 MB: a client may choose a K of many thousands."""


class Span(NamedTuple):
    """Place of an item's indices in the buffer, and how much had been written before them."""

    start: int
    stop: int
    written: int


class IndexRing:
    """Ring buffer of the indices of items: the oldest ones are overwritten.

    A small tensor of its own for each item would outlive the temporary tensors around it, whose
    memory an allocator could then not join: on a CPU it grew by tens of megabytes.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._spans: OrderedDict[Hashable, Span] = OrderedDict()  # in the order of writing
        self._end = 0
        self._written = 0

    def get(self, key: Hashable) -> Tensor | None:
        """Indices ``(K,)`` of an item, or None.

        They are written again when half of what fits is newer, so that items in use stay.
        """
        span = self._spans.get(key)
        if span is None or self._buffer is None:
            return None
        indices = self._buffer[span.start : span.stop].clone()
        if self._written - span.written > MAX_INDICES // 2:
            del self._spans[key]
            self.put(key, indices)
        return indices

    def put(self, key: Hashable, indices: Tensor) -> None:
        """Write the indices ``(K,)`` of an item that is not kept yet."""
        if key in self._spans or len(indices) > MAX_INDICES:
            return
        if self._buffer is None:
            with torch.inference_mode(False):  # else nothing could be written outside of that mode
                self._buffer = indices.new_empty(MAX_INDICES)
        if self._end + len(indices) > MAX_INDICES:
            self._drop_from(self._end, MAX_INDICES)
            self._end = 0
        span = Span(self._end, self._end + len(indices), self._written)
        self._drop_from(span.start, span.stop)
        self._buffer[span.start : span.stop] = indices
        self._spans[key] = span
        self._end = span.stop
        # A small item takes the place of an average one: their number is bounded as well.
        self._written += max(len(indices), MAX_INDICES // MAX_CORES)
        if len(self._spans) > MAX_CORES:
            self._spans.popitem(last=False)

    def clear(self) -> None:
        """Drop all items."""
        self._spans.clear()
        self._end = 0

    def _drop_from(self, start: int, stop: int) -> None:
        """Drop the items that are next in the buffer and begin within these bounds."""
        while self._spans and start <= next(iter(self._spans.values())).start < stop:
            self._spans.popitem(last=False)


class CoreCache:
    """Indices of items, and within ``limit`` bytes the similarities conditioned on cores."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self._indices = IndexRing()
        self._conditioned: OrderedDict[Hashable, Conditioned] = OrderedDict()

    def indices(self, key: Hashable) -> Tensor | None:
        """Indices ``(K,)`` of an item in the order of its rows, or None."""
        return self._indices.get(key)

    def put_indices(self, key: Hashable, indices: Tensor) -> None:
        """Keep the indices ``(K,)`` of an item: the first ones, which its KV blocks were made of.

        Images without a key (None) are not kept, here and below.
        """
        if key is not None:
            self._indices.put(key, indices)

    def conditioned(self, key: Hashable) -> Conditioned | None:
        """Similarity of an image conditioned on its core, or None; now the most recently used."""
        conditioned = self._conditioned.get(key)
        if conditioned is not None:
            self._conditioned.move_to_end(key)
        return conditioned

    def put_conditioned(self, key: Hashable, conditioned: Conditioned) -> None:
        """Keep the similarity of one image conditioned on a core, where there is room for it."""
        if key is None or key in self._conditioned or conditioned.nbytes > self.limit:
            return
        self._conditioned[key] = conditioned
        self.used_bytes += conditioned.nbytes
        while self.used_bytes > self.limit:
            _, dropped = self._conditioned.popitem(last=False)
            self.used_bytes -= dropped.nbytes

    def clear(self) -> None:
        """Drop everything, as when the weights that features are made with are replaced."""
        self._indices.clear()
        self._conditioned.clear()
        self.used_bytes = 0
