"""Processed images in vLLM's caches: sent to the engine once, their plans with every request.

A request whose prompt is only rendered (``/tokenize``, ``/v1/messages/count_tokens``), or is
refused after rendering (too long for the model, too large for the encoder cache), is not handed
over. So it is not mistaken for one whose images the engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from cachetools import Cache
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem

from vllm_autoprune.serving.compat import depends_on, patch, wraps
from vllm_autoprune.serving.plan import FIELD

if TYPE_CHECKING:
    from vllm.multimodal.cache.base import (
        BaseMultiModalReceiverCache,
        MultiModalProcessorCacheInItem,
        MultiModalProcessorCacheItemMetadata,
        MultiModalProcessorCacheOutItem,
    )
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate
    from vllm.utils.cache import CacheInfo

# vLLM's record of the images that the engine has, changed only by requests that reach the engine.
#
# ``LruKeyReplicatedSenderCache`` of the API server mirrors the engine's cache of processed images,
# whose tensors are not sent again. So both have to see the same requests in the same order. vLLM
# changes it while a request is rendered. If that request is then refused, only rendered or
# overtaken, the two differ, and a later request fails with status 500
# (``MultiModalCacheMissError``). Here rendering only reads the cache, and the hand-over to the
# engine changes it.

_Tensors = Mapping[str, "MultiModalFieldElem"]


@dataclass(slots=True, weakref_slot=True, eq=False)
class RenderedItem:
    """Unpruned prompt text of one image, and its processed tensors, which exclude the plan."""

    tensors: MultiModalKwargsItem
    updates: Sequence[ResolvedPromptUpdate]


Waiting = WeakValueDictionary[str, RenderedItem]
"""Images of requests that are rendered and may still be handed over, by key."""


def _key(feature: MultiModalFeatureSpec) -> str:
    return feature.mm_hash or feature.identifier


def _set_plan_apart(feature: MultiModalFeatureSpec) -> tuple[_Tensors, _Tensors]:
    """Separate the tensors of an item from its plan."""
    data = feature.data or {}
    tensors = {name: element for name, element in data.items() if name != FIELD}
    return tensors, {FIELD: data[FIELD]} if FIELD in data else {}


@depends_on(
    "vllm.multimodal.cache:LruKeyReplicatedSenderCache",
    "get_and_update_item",
    "touch_sender_cache_item",
)
class Rendering(BaseMultiModalProcessorCache):
    """The sender cache as one rendering reads it: vLLM's own, plus ``waiting``.

    Rendering adds to ``waiting`` and leaves the sender cache unchanged. :meth:`hand_over` changes
    that; it is called in the order in which the engine gets the requests, in one thread, while
    renderings may run in others.
    """

    def __init__(self, sender: LruKeyReplicatedSenderCache, waiting: Waiting) -> None:
        self._sender = sender
        self._waiting = waiting
        self._updates: dict[str, Sequence[ResolvedPromptUpdate]] = {}
        self._items: dict[str, RenderedItem] = {}
        self.process_again: Callable[[], Mapping[str, RenderedItem]] | None = None
        """Processes the images of the request without a cache; set until the request is handed
        over."""

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the engine has the image, or a waiting request will bring it."""
        try:
            # Not the method of the LRU cache, which would mark the image as recently used.
            cached = cast(
                "MultiModalProcessorCacheItemMetadata",
                Cache.__getitem__(self._sender._cache, mm_hash),
            )
        except KeyError:
            item = self._waiting.get(mm_hash)
            if item is None:
                return False
            self._items[mm_hash] = item
        else:
            self._updates[mm_hash] = cached.prompt_updates
        return True

    def get_and_update_item(
        self, mm_item: MultiModalProcessorCacheInItem, mm_hash: str
    ) -> MultiModalProcessorCacheOutItem:
        """Tensors of an image and its prompt text; the tensors are None if the engine has them."""
        if mm_item is not None:
            self._items[mm_hash] = self._waiting[mm_hash] = RenderedItem(*mm_item)
        elif mm_hash in self._updates:
            return None, self._updates[mm_hash]
        item = self._items[mm_hash]
        return item.tensors, item.updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Does nothing: the hand-over marks images as recently used."""

    def clear_cache(self) -> None:
        """Clear the sender cache."""
        self._sender.clear_cache()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """Statistics of the sender cache."""
        return self._sender.make_stats(delta=delta)

    def hand_over(
        self, features: Sequence[MultiModalFeatureSpec], again: bool = False
    ) -> None:
        """Give a request the tensors that the engine lacks, and no others.

        Repeats on the sender cache what the engine will do to its own cache. Of several items of
        one image the first brings the tensors (:func:`cache_without_plans`). With ``again`` this is
        another sample of the request, whose features are complete already.
        """
        unsent = dict.fromkeys(map(_key, features))
        for key in unsent:
            self._sender.touch_sender_cache_item(key)
        if again:
            return
        for feature in features:
            key = _key(feature)
            added, plan = _set_plan_apart(feature)
            tensors: _Tensors = {}
            if key in unsent:
                del unsent[key]
                cached = self._sender.is_cached_item(key)
                if not cached and key not in self._items and added:
                    # An input that vLLM added after rendering, which its engine caches like all
                    # others.
                    self._items[key] = RenderedItem(MultiModalKwargsItem(added), ())
                if (
                    not cached
                    and key not in self._items
                    and self.process_again is not None
                ):
                    # The engine had the image when it was rendered, and has dropped it since.
                    self._items.update(self.process_again())
                item = None if cached else self._items.get(key)
                # An image sent by a name that is not cached has no item: vLLM answers that it is
                # unknown.
                if cached or item is not None:
                    self._sender.get_and_update_item(
                        item and (item.tensors, item.updates), key
                    )
                tensors = {} if item is None else item.tensors
            feature.data = (
                MultiModalKwargsItem({**tensors, **plan}) if tensors or plan else None
            )
        self.process_again = None


# The engine's cache holds the tensors of an image once, whatever is asked about it.
#
# An item of a request consists of the tensors of an image and a plan. Tensors are cached by the
# content of the image; the plan, a few hundred bytes, travels with every request. So the tensors
# are not sent or kept again for another question, for another K, or for the parts and recalls of an
# image.


@wraps(
    "vllm.multimodal.cache.base:BaseMultiModalReceiverCache", "get_and_update_features"
)
def cache_without_plans() -> None:
    """Have vLLM's receiver caches hold tensors only, and set the plans aside.

    Of several items of one image the first has the tensors, or the cache has them. Otherwise stock
    vLLM raises ``MultiModalCacheMissError``, which fails only that request.

    Why: these caches hold an item whole, so another question about an image would send and keep its
    tensors again.
    Remove when: fields of an item can be left out of the caches.
    """
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache

    @patch(BaseMultiModalReceiverCache, "get_and_update_features")
    def get_and_update_features(
        stock: Callable[..., object],
        self: BaseMultiModalReceiverCache,
        mm_features: list[MultiModalFeatureSpec],
    ) -> list[MultiModalFeatureSpec]:
        plans: list[_Tensors] = []
        with_tensors: dict[str, MultiModalFeatureSpec] = {}
        received = []
        for feature in mm_features:
            tensors, plan = _set_plan_apart(feature)
            plans.append(plan)
            feature.data = MultiModalKwargsItem(tensors) if tensors else None
            if tensors or _key(feature) not in with_tensors:
                received.append(feature)
                with_tensors.setdefault(_key(feature), feature)
        stock(self, received)
        for feature, plan in zip(mm_features, plans, strict=True):
            tensors = feature.data or with_tensors[_key(feature)].data or {}
            feature.data = MultiModalKwargsItem({**tensors, **plan})
        return mm_features
