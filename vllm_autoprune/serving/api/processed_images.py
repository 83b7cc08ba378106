"""Processed tensors of recent images: another question on an image does not process it again.

vLLM's own processor cache does not find them: it is keyed by what the engine caches an image under,
and a pruned image is cached under its question, K and state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItem, NestedTensors

MAX_BYTES = 1 << 28
"""Tensors that a process keeps, the least recently used dropped first: 256 MiB."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The tensors that an image processor made of one image, and their digest."""

    tensors: MultiModalKwargsItem
    digest: str


class ProcessedImages:
    """LRU map from an image's content to its processed tensors, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, tuple[ProcessedImage, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()  # several renderer threads may share one processor

    def find(self, content: str) -> ProcessedImage | None:
        """The processed image of this content, or None where it is not known (any more)."""
        with self._lock:
            entry = self._images.get(content)
            if entry is None:
                return None
            self._images.move_to_end(content)
            return entry[0]

    def remember(self, content: str, image: ProcessedImage) -> None:
        """Keep a processed image, unless it is larger than all that may be kept."""
        size = sum(_count_bytes(element.data) for element in image.tensors.values())
        if size > self._max_bytes:
            return
        with self._lock:
            _, replaced = self._images.pop(content, (None, 0))
            self._images[content] = image, size
            self._bytes += size - replaced
            while self._bytes > self._max_bytes:
                _, (_, dropped) = self._images.popitem(last=False)
                self._bytes -= dropped


def _count_bytes(data: NestedTensors | None) -> int:
    if isinstance(data, torch.Tensor):
        return data.nbytes
    return sum(map(_count_bytes, data)) if isinstance(data, list | tuple) else 0
