"""The engine's cache of processed images: tensors by content, plans by request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.receiver_cache import wrap_get_and_update_features

pytestmark = pytest.mark.compat

CAT, DOG = torch.full((4,), 1.0), torch.full((4,), 2.0)


def feature(key: str, pixels: torch.Tensor | None = None, budget: int | None = 4) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    parts: dict[str, Any] = {"pixel_values": pixels}
    if budget is not None:
        parts[FIELD] = ItemPlan(budget, (1, 1)).encode()
    field = MultiModalBatchedField()
    item = {k: MultiModalFieldElem(v, field) for k, v in parts.items() if v is not None}
    data = MultiModalKwargsItem(item) if item else None
    return SimpleNamespace(mm_hash=key, identifier=f"{key} asked {budget}", data=data)


class Engine:
    """vLLM's receiver cache, with the wrapper around its method."""

    def __init__(self) -> None:
        from vllm.multimodal.cache import LruKeyReplicatedReceiverCache

        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1)
        )
        self.cache = LruKeyReplicatedReceiverCache(config)
        stock = LruKeyReplicatedReceiverCache.get_and_update_features
        self._receive = wrap_get_and_update_features(getattr(stock, "__wrapped__", stock))

    def receive(self, *features: Any) -> list[tuple[float, int | None]]:
        """Pixel and K of each item."""
        return [
            (
                float(one.data["pixel_values"].data[0]),
                ItemPlan.decode(one.data[FIELD].data).budget if FIELD in one.data else None,
            )
            for one in self._receive(self.cache, list(features))
        ]


def test_the_first_item_of_an_image_brings_the_tensors_of_the_others() -> None:
    items = feature("cat", CAT, 3), feature("dog", DOG), feature("cat", None, 1)
    assert Engine().receive(*items) == [(1, 3), (2, 4), (1, 1)]


def test_an_image_is_kept_once_and_without_a_plan() -> None:
    engine = Engine()
    engine.receive(*(feature("cat", CAT if k == 1 else None, k) for k in range(1, 9)))
    assert engine.receive(feature("cat", None, 9)) == [(1, 9)]
    assert engine.receive(feature("cat", None, None)) == [(1, None)]
    assert list(engine.cache._cache) == ["cat"]
    assert set(engine.cache._cache["cat"]) == {"pixel_values"}


def test_an_image_that_is_not_known_fails_its_request_alone() -> None:
    from vllm.multimodal.cache import MultiModalCacheMissError

    engine = Engine()
    with pytest.raises(MultiModalCacheMissError) as error:
        engine.receive(feature("dog", DOG), feature("cat", None))
    assert error.value.mm_hashes == ["cat"]
    assert engine.receive(feature("cat", CAT)) == [(1, 4)]


def test_two_images_that_a_peer_sends_under_one_key_keep_their_tensors() -> None:
    assert Engine().receive(feature("x", CAT), feature("x", DOG)) == [(1, 4), (2, 4)]
