"""Tensors of an image that is several items of one request travel to the engine once.

The parts of a split image, and what later turns recall of it, have one image's tensors under
several cache identities. All items but the first are sent with their plan alone; the engine adds
the tensors of the first, which came with the request or are in vLLM's receiver cache, before that
cache stores the item. So the sender's cache and the receiver's still count the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.compat import wrap
from vllm_autoprune.serving.shared.plan import FIELD, NO_KEY, ItemPlan

if TYPE_CHECKING:
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    Receive = Callable[
        [BaseMultiModalReceiverCache, list[MultiModalFeatureSpec]], list[MultiModalFeatureSpec]
    ]


def drop_repeated_tensors(
    features: Sequence[MultiModalFeatureSpec], contents: Mapping[str, str]
) -> None:
    """Remove the tensors of images that an earlier item of the request brings.

    ``contents`` is the content of each pruned item by cache identity.
    """
    from vllm.multimodal.inputs import MultiModalKwargsItem

    seen = set()
    for feature in features:
        content = contents.get(_key(feature))
        if content in seen and feature.data is not None:
            feature.data = MultiModalKwargsItem({FIELD: feature.data[FIELD]})
        if content is not None:
            seen.add(content)


def restore_repeated_tensors() -> None:
    """Let the engine's process restore the tensors that :func:`drop_repeated_tensors` removed."""
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache

    wrap(BaseMultiModalReceiverCache, "get_and_update_features", wrap_get_and_update_features)


def wrap_get_and_update_features(stock: Receive) -> Receive:
    """``BaseMultiModalReceiverCache.get_and_update_features``, with the tensors restored before.

    Raises vLLM's ``MultiModalCacheMissError``, which fails the request alone, where no item of the
    request has the tensors; the client may send it again, and then everything travels.
    """

    def get_and_update_features(
        self: BaseMultiModalReceiverCache, mm_features: list[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        from vllm.multimodal.cache import MultiModalCacheMissError
        from vllm.multimodal.inputs import MultiModalKwargsItem

        for i, feature in enumerate(mm_features):
            if not _lacks_tensors(feature.data):
                continue
            first = _find_item(self, mm_features[:i], _plan_key(feature.data))
            if first is None:
                raise MultiModalCacheMissError([_key(each) for each in mm_features])
            feature.data = MultiModalKwargsItem({**first, FIELD: feature.data[FIELD]})
        return stock(self, mm_features)

    return get_and_update_features


def _find_item(
    cache: BaseMultiModalReceiverCache,
    features: Sequence[MultiModalFeatureSpec],
    key: tuple[int, int] | None,
) -> MultiModalKwargsItem | None:
    """The item of this image, among those before it in the request."""
    from vllm.multimodal.cache import MultiModalCacheMissError

    for feature in features:
        item = feature.data
        if item is None:
            try:
                item = cache.get_and_update_item(None, _key(feature))
            except MultiModalCacheMissError:
                continue  # the stock method reports it, with all others of the request
        if key is not None and not _lacks_tensors(item) and _plan_key(item) == key:
            return item
    return None


def _lacks_tensors(item: MultiModalKwargsItem | None) -> bool:
    return item is not None and set(item) == {FIELD}


def _plan_key(item: MultiModalKwargsItem) -> tuple[int, int] | None:
    """Digest of the image's tensors; None for whole images, and for what is no plan of ours."""
    if FIELD not in item:
        return None
    try:
        key = ItemPlan.decode(item[FIELD].data).key
    except AutopruneError:
        return None
    return None if key == NO_KEY else key


def _key(feature: MultiModalFeatureSpec) -> str:
    return feature.mm_hash or feature.identifier
