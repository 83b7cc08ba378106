"""Processed images that vLLM's sender cache counts as sent before they are.

``LruKeyReplicatedSenderCache`` records an image as known to the engine when a request with it is
rendered. If that request is then refused (a prompt too long, a sampling parameter out of range),
the next request with the image is sent without its tensors, and the engine, which never got them,
fails it with status 500 (``MultiModalCacheMissError``). Stock vLLM has one such failure an image;
with pruning an identity is an image with its question, K and state, so there would be more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    Tensors = dict[str, MultiModalKwargsItem]
    """Processed images by cache identity."""


class UnsentItems:
    """Weak references to images that were rendered and have not been handed to the engine.

    Rendering threads call :meth:`hold` and :meth:`add`, the thread that hands requests over calls
    :meth:`hand_over`. Tensors live as long as a request that may still be sent with them.
    """

    def __init__(self) -> None:
        self._items: dict[str, ref[MultiModalKwargsItem]] = {}
        self._dropped: deque[str] = deque()

    def hold(self, cache: LruKeyReplicatedSenderCache, hashes: Iterable[str]) -> Tensors:
        """The unsent ones among ``hashes``, to be kept until this request is handed over.

        Called before the cache is read: images whose requests were all refused are removed from it,
        so that they are processed and sent again.
        """
        held = {}
        for key in hashes:
            reference = self._items.get(key)
            item = None if reference is None else reference()
            if item is not None:
                held[key] = item
            elif reference is not None:
                self._dropped.append(key)
        while self._dropped:
            key = self._dropped.popleft()
            reference = self._items.get(key)
            if reference is not None and reference() is None:
                del self._items[key]
                cache.invalidate(key)
        return held

    def add(
        self,
        hashes: Mapping[str, Sequence[str]],
        items: Mapping[str, Sequence[MultiModalKwargsItem | None]],
    ) -> Tensors:
        """Record the images of a rendered request that come with their tensors, and return them."""
        added = {
            key: item
            for modality, keys in hashes.items()
            for key, item in zip(keys, items[modality], strict=True)
            if item is not None
        }
        for key, item in added.items():
            self._items[key] = ref(item, self._note_dropped(key))
        return added

    def _note_dropped(self, key: str) -> Callable[[object], None]:
        return lambda _: self._dropped.append(key)

    def hand_over(self, features: Sequence[MultiModalFeatureSpec], tensors: Tensors) -> None:
        """Give a request that is sent next the tensors that no request was sent with before it."""
        for feature in features:
            key = feature.mm_hash or feature.identifier
            if key in self._items and feature.data is None:
                feature.data = tensors.get(key)
            if feature.data is not None:
                self._items.pop(key, None)
