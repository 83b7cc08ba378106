"""The engine's cache of processed images holds an image once, whatever is asked about it.

An item of a request is the tensors of an image and a plan. Tensors are cached by the content of the
image; the plan, a few hundred bytes, travels with every request. So neither another question nor
another K nor the parts and recalls of an image send or keep its tensors twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_autoprune.serving.compat import wrap
from vllm_autoprune.serving.shared.plan import FIELD

if TYPE_CHECKING:
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    Receive = Callable[
        [BaseMultiModalReceiverCache, list[MultiModalFeatureSpec]], list[MultiModalFeatureSpec]
    ]


def cache_without_plans() -> None:
    """Let vLLM's receiver caches hold tensors alone."""
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache

    wrap(BaseMultiModalReceiverCache, "get_and_update_features", wrap_get_and_update_features)


def wrap_get_and_update_features(stock: Receive) -> Receive:
    """``BaseMultiModalReceiverCache.get_and_update_features``, with the plans set aside.

    Of several items of one image the first has the tensors, or the cache has them. Otherwise stock
    raises ``MultiModalCacheMissError``, which fails the request alone.
    """

    def get_and_update_features(
        self: BaseMultiModalReceiverCache, mm_features: list[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        from vllm.multimodal.inputs import MultiModalKwargsItem

        plans = [{FIELD: f.data[FIELD]} if f.data and FIELD in f.data else {} for f in mm_features]
        first: dict[str, MultiModalFeatureSpec] = {}
        received = []
        for feature in mm_features:
            tensors = {name: part for name, part in (feature.data or {}).items() if name != FIELD}
            feature.data = MultiModalKwargsItem(tensors) if tensors else None
            key = feature.mm_hash or feature.identifier
            if tensors or key not in first:
                received.append(feature)
                first.setdefault(key, feature)
        stock(self, received)
        for feature, plan in zip(mm_features, plans, strict=True):
            tensors = feature.data or first[feature.mm_hash or feature.identifier].data or {}
            feature.data = MultiModalKwargsItem({**tensors, **plan})
        return mm_features

    return get_and_update_features
