"""Processed images that vLLM's sender cache counts as sent before they are.

``LruKeyReplicatedSenderCache`` records an image as known to the engine when a request with it is
rendered. If that request is then refused (a prompt too long, a sampling parameter out of range),
the next request with the image is sent without its tensors, and the engine, which never got them,
fails it with status 500 (``MultiModalCacheMissError``). Stock vLLM has one such failure an image;
with pruning an identity is an image with its question, K and state, so there would be more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ref

from vllm.multimodal.cache import LruKeyReplicatedSenderCache

if TYPE_CHECKING:
    from vllm.multimodal.cache import BaseMultiModalProcessorCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    Tensors = dict[str, MultiModalKwargsItem]
    """Processed images by cache identity."""


class UnsentItems:
    """Weak references to images that were rendered and have not been handed to the engine.

    The rendering thread calls :meth:`rendering`, the one that hands requests over calls
    :meth:`hand_over`. Tensors live as long as a request that may still be sent with them.
    """

    def __init__(self) -> None:
        self._items: dict[str, ref[MultiModalKwargsItem]] = {}
        self._dropped: deque[str] = deque()

    @contextmanager
    def rendering(
        self, cache: BaseMultiModalProcessorCache | None, hashes: Sequence[str]
    ) -> Iterator[Tensors]:
        """Context manager around the rendering of a request: the images of it not sent so far.

        Their tensors have to be kept with the request. The caller adds those that it brings itself
        (:func:`collect_tensors`). Images whose requests were all refused are removed from the cache
        before it is read, so that they are processed and sent again; so are those of this request
        if it fails here.
        """
        if not isinstance(cache, LruKeyReplicatedSenderCache):
            yield {}  # the other kinds of cache hold the tensors themselves
            return
        unsent = self._find_unsent(hashes)
        self._remove_dropped(cache)
        absent = [key for key in hashes if not cache.is_cached_item(key)]
        tensors = dict(unsent)
        try:
            yield tensors
        except BaseException:
            for key in absent:
                cache.invalidate(key)
            raise
        for key, item in tensors.items():
            if key not in unsent:
                self._items[key] = ref(item, self._note_dropped(key))

    def _find_unsent(self, hashes: Iterable[str]) -> Tensors:
        unsent = {}
        for key in hashes:
            reference = self._items.get(key)
            item = None if reference is None else reference()
            if item is not None:
                unsent[key] = item
            elif reference is not None:
                self._dropped.append(key)
        return unsent

    def _remove_dropped(self, cache: LruKeyReplicatedSenderCache) -> None:
        while self._dropped:
            key = self._dropped.popleft()
            reference = self._items.get(key)
            if reference is not None and reference() is None:
                del self._items[key]
                cache.invalidate(key)

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


def collect_tensors(
    hashes: Mapping[str, Sequence[str]],
    items: Mapping[str, Sequence[MultiModalKwargsItem | None]],
) -> Tensors:
    """The images of a rendered request that come with their tensors."""
    return {
        key: item
        for modality, keys in hashes.items()
        if modality in items  # of dummy inputs a modality may have none
        for key, item in zip(keys, items[modality], strict=True)
        if item is not None
    }
