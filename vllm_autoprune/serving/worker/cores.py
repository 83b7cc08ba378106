"""Cores of images: the tokens that were kept for every question, for the questions that follow.

The KV blocks of a core stay in vLLM's prefix cache longer than the image's features stay here. Its
indices are kept for longer too, so that a question asked then leaves out the same tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

from vllm_autoprune.ops.dpp_torch import Conditioned

MAX_CORES = 8192
"""Cores whose indices are kept, the least recently used dropped first."""

MAX_INDICES = MAX_CORES * 160
"""Indices of all of them, 10 MB: clients choose K_c, which may be the tokens of a large image."""


class CoreCache:
    """Indices of cores, and within ``limit`` bytes the similarities conditioned on them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self._kept = 0
        self._indices: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._conditioned: OrderedDict[Hashable, Conditioned] = OrderedDict()

    def indices(self, key: Hashable) -> Tensor | None:
        """Indices ``(K_c,)`` of a core, now the most recently used, or None."""
        indices = self._indices.get(key)
        if indices is not None:
            self._indices.move_to_end(key)
        return indices

    def put_indices(self, key: Hashable, indices: Tensor) -> None:
        """Keep the indices ``(K_c,)`` of a core: the first ones, which its KV blocks were made of.

        Images without a key (None) are not kept, here and below.
        """
        if key is None:
            return
        if key not in self._indices:
            self._indices[key] = indices.clone()
            self._kept += indices.numel()
        self._indices.move_to_end(key)
        while len(self._indices) > MAX_CORES or self._kept > MAX_INDICES:
            _, dropped = self._indices.popitem(last=False)
            self._kept -= dropped.numel()

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
        self._kept = self.used_bytes = 0
