"""Vision features of an image, kept per image so that further questions skip the vision tower.

Knows nothing about questions or budgets: what is kept here depends on the image alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TowerFeatures:
    """One image inside the vision tower: :class:`vllm_autoprune.tpdsl.tower.TowerStates` of it.

    patches ``(N, Dv)``; cls ``(1, Dv)``; keys ``(N, dk)``; of the next layer, where the state
    reads it, attention ``(N,)`` and keys ``(N, Dv)``. The same record holds a batch, with B in
    front of each shape.
    """

    patches: Tensor
    cls: Tensor
    keys: Tensor
    next_attention: Tensor | None = None
    next_keys: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is held."""
        held = (self.patches, self.cls, self.keys, self.next_attention, self.next_keys)
        yield from (part for part in held if part is not None)

    def of(self, image: int) -> TowerFeatures:
        """One image of a batch, copied: a view would keep the whole batch alive."""
        attention, keys = self.next_attention, self.next_keys
        return TowerFeatures(
            self.patches[image].clone(),
            self.cls[image].clone(),
            self.keys[image].clone(),
            None if attention is None else attention[image].clone(),
            None if keys is None else keys[image].clone(),
        )


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """One image after the vision tower.

    projected ``(N, D)``; cls_attention ``(N,)`` and patches ``(N, C)``, the tokens in the space
    where relevance is measured, only where the state reads them; cosine ``(N, N)`` float32
    between the projected tokens; tower only where the state reads it.
    """

    projected: Tensor
    cls_attention: Tensor | None
    patches: Tensor | None
    cosine: Tensor | None = None
    tower: TowerFeatures | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is held."""
        held = (self.projected, self.cls_attention, self.patches, self.cosine)
        yield from (part for part in held if part is not None)
        if self.tower is not None:
            yield from self.tower.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.numel() * part.element_size() for part in self.tensors())


class FeatureCache:
    """Least recently used images, bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Key, ImageFeatures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> ImageFeatures | None:
        """The features of an image, now the most recently used, or None."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return found

    def put(self, key: Key, features: ImageFeatures) -> None:
        """Keep an image's features, dropping the least recently used ones beyond the bound."""
        if features.nbytes > self.limit or key in self._entries:
            return
        self._entries[key] = features
        self.held += features.nbytes
        while self.held > self.limit:
            _, dropped = self._entries.popitem(last=False)
            self.held -= dropped.nbytes

    def clear(self) -> None:
        """Forget every image: other weights would see them otherwise."""
        self._entries.clear()
        self.held = 0

    def reserve(self, device: torch.device) -> Tensor | None:
        """A buffer of the bound's size, to be held while vLLM profiles a device's memory.

        vLLM gives all memory that profiling left free to the KV cache, so what this cache will
        hold later has to be seen then. The CPU's KV cache has a fixed size: nothing to reserve.
        """
        if device.type == "cpu" or self.limit == 0:
            return None
        return torch.empty(self.limit, dtype=torch.uint8, device=device)
