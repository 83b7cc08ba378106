"""Both caches of processed images hold the same, whatever becomes of the requests."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_autoprune.serving.api.engine_requests import (
    RenderedItem,
    Rendering,
    Waiting,
    cache_without_plans,
)
from vllm_autoprune.serving.plan import FIELD, ItemPlan

pytestmark = pytest.mark.compat


IMAGE_BYTES = 400


class Server:
    """vLLM's two caches with room for ``images``, and the steps of a request between them."""

    def __init__(self, images: int = 100) -> None:
        from vllm.multimodal.cache import (
            LruKeyReplicatedReceiverCache,
            LruKeyReplicatedSenderCache,
        )

        gigabytes = images * IMAGE_BYTES / (1 << 30)
        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=gigabytes)
        )
        self.sender = LruKeyReplicatedSenderCache(config)
        self.engine = LruKeyReplicatedReceiverCache(config)
        cache_without_plans()
        self.waiting = Waiting()
        self.processed: list[str] = []

    def render(self, *keys: str, by_name: bool = False) -> Any:
        """A request with images of these keys, as vLLM's processor renders it."""
        rendering = Rendering(self.sender, self.waiting)
        cached = rendering.is_cached(list(keys))
        items = [
            rendering.get_and_update_item(None if known else (self._process(key), []), key)[0]
            for key, known in zip(keys, cached, strict=True)
        ]
        if not by_name:
            rendering.process_again = lambda: {
                key: RenderedItem(self._process(key), []) for key in keys
            }
        plan = element(torch.zeros(13, dtype=torch.int64))
        features = [
            SimpleNamespace(mm_hash=key, identifier="i", data={**(item or {}), FIELD: plan})
            for key, item in zip(keys, items, strict=True)
        ]
        return SimpleNamespace(features=features, rendering=rendering)

    def _process(self, key: str) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItem

        self.processed.append(key)
        name = torch.tensor([ord(letter) for letter in key.ljust(IMAGE_BYTES // 4)]).to(torch.int32)
        return MultiModalKwargsItem({"pixel_values": element(name)})

    def send(self, request: Any) -> list[bool]:
        """Which items had tensors; raises MultiModalCacheMissError, which vLLM answers by 500."""
        request.rendering.hand_over(request.features)
        had = [set(feature.data) != {FIELD} for feature in request.features]
        for feature in self.engine.get_and_update_features(list(request.features)):
            key = "".join(map(chr, feature.data["pixel_values"].data)).rstrip()
            assert (key, FIELD in feature.data) == (feature.mm_hash, True)
        return had

    @property
    def agree(self) -> bool:
        return list(self.sender._cache.order) == list(self.engine._cache.order)


def element(data: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem

    return MultiModalFieldElem(data, MultiModalBatchedField())


def test_an_image_that_came_by_name_and_was_dropped_fails_its_request_alone() -> None:
    from vllm.multimodal.cache import MultiModalCacheMissError

    server = Server(images=1)
    server.send(server.render("a"))
    waits = server.render("a", by_name=True)
    server.send(server.render("b"))
    with pytest.raises(MultiModalCacheMissError):
        server.send(waits)
    assert server.send(server.render("b")) == [False]


@pytest.mark.parametrize("seed", range(20))
def test_caches_agree_whatever_is_refused_and_overtaken(seed: int) -> None:
    rng = random.Random(seed)
    server, waiting = Server(images=4), list[Any]()
    for _ in range(300):
        waiting.append(server.render(*rng.choices("abcdefgh", k=rng.randint(1, 5))))
        if rng.random() < 0.3:
            waiting.pop(rng.randrange(len(waiting)))
        while len(waiting) > rng.randint(0, 4):
            server.send(waiting.pop(rng.randrange(len(waiting))))
            assert server.agree


def feature(key: str, pixels: float | None, budget: int | None = 4) -> Any:
    """An item as it reaches the engine: tensors where this one brings them, and its plan."""
    from vllm.multimodal.inputs import MultiModalKwargsItem

    parts = {}
    if pixels is not None:
        parts["pixel_values"] = element(torch.full((4,), pixels))
    if budget is not None:
        parts[FIELD] = element(ItemPlan(budget, (1, 1)).encode())
    data = MultiModalKwargsItem(parts) if parts else None
    return SimpleNamespace(mm_hash=key, identifier=f"{key} asked {budget}", data=data)


def received(server: Server, *features: Any) -> list[tuple[float, int | None]]:
    """Pixel and K of each item, after the engine's cache."""
    return [
        (
            float(item.data["pixel_values"].data[0]),
            ItemPlan.decode(item.data[FIELD].data).budget if FIELD in item.data else None,
        )
        for item in server.engine.get_and_update_features(list(features))
    ]


def test_an_image_is_kept_once_and_without_a_plan() -> None:
    server = Server()
    received(server, *(feature("cat", 1.0 if k == 1 else None, k) for k in range(1, 9)))
    assert received(server, feature("cat", None, 9)) == [(1, 9)]
    assert received(server, feature("cat", None, None)) == [(1, None)]
    assert list(server.engine._cache) == ["cat"]
    assert set(server.engine._cache["cat"]) == {"pixel_values"}


def test_two_images_that_a_peer_sends_under_one_key_keep_their_tensors() -> None:
    both = feature("x", 1.0), feature("x", 2.0)
    assert received(Server(), *both) == [(1, 4), (2, 4)]
