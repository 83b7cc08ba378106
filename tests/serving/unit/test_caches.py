"""Both caches of processed images hold the same, whatever becomes of the requests."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache import (
    LruKeyReplicatedReceiverCache,
    LruKeyReplicatedSenderCache,
    MultiModalCacheMissError,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from vllm_autoprune.serving.api.engine_requests import (
    RenderedItem,
    Rendering,
    Waiting,
    cache_without_plans,
)
from vllm_autoprune.serving.plan import FIELD, ItemPlan

pytestmark = pytest.mark.compat

IMAGE_BYTES = 400


def element(data: torch.Tensor) -> Any:
    return MultiModalFieldElem(data, MultiModalBatchedField())


def plan_element(budget: int) -> Any:
    return element(ItemPlan(budget, (1, 1)).encode())


class Server:
    """vLLM's two caches with room for ``images``, and the steps of a request between them."""

    def __init__(self, images: int = 100) -> None:
        room = SimpleNamespace(mm_processor_cache_gb=images * IMAGE_BYTES / (1 << 30))
        config: Any = SimpleNamespace(get_multimodal_config=lambda: room)
        self.sender = LruKeyReplicatedSenderCache(config)
        self.engine = LruKeyReplicatedReceiverCache(config)
        cache_without_plans()
        self.waiting = Waiting()

    def render(self, *keys: str, by_name: bool = False) -> Any:
        """A request with images of these keys, as vLLM's processor renders it."""

        def process(key: str) -> Any:
            name = torch.tensor([ord(letter) for letter in key.ljust(IMAGE_BYTES // 4)])
            return MultiModalKwargsItem({"pixel_values": element(name.to(torch.int32))})

        rendering = Rendering(self.sender, self.waiting)
        cached = rendering.is_cached(list(keys))
        items = [
            rendering.get_and_update_item(None if known else (process(key), []), key)[0]
            for key, known in zip(keys, cached, strict=True)
        ]
        if not by_name:
            rendering.process_again = lambda: {key: RenderedItem(process(key), []) for key in keys}
        features = [
            SimpleNamespace(
                mm_hash=key, identifier="i", data={**(item or {}), FIELD: plan_element(4)}
            )
            for key, item in zip(keys, items, strict=True)
        ]
        return SimpleNamespace(features=features, rendering=rendering)

    def send(self, request: Any) -> list[bool]:
        """Which items had tensors; raises MultiModalCacheMissError, which vLLM answers by 500."""
        request.rendering.hand_over(request.features)
        had = [set(feature.data) != {FIELD} for feature in request.features]
        for feature in self.engine.get_and_update_features(list(request.features)):
            key = "".join(map(chr, feature.data["pixel_values"].data)).rstrip()
            assert (key, FIELD in feature.data) == (feature.mm_hash, True)
        return had


def test_an_image_that_came_by_name_and_was_dropped_fails_its_request_alone() -> None:
    server = Server(images=1)
    server.send(server.render("a"))
    waits = server.render("a", by_name=True)
    server.send(server.render("b"))
    with pytest.raises(MultiModalCacheMissError):
        server.send(waits)
    assert server.send(server.render("b")) == [False]


@pytest.mark.parametrize("seed", range(20))
def test_caches_agree_whatever_is_refused_and_overtaken(seed: int) -> None:
    source, server, waiting = random.Random(seed), Server(images=4), list[Any]()
    for _ in range(300):
        waiting.append(server.render(*source.choices("abcdefgh", k=source.randint(1, 5))))
        if source.random() < 0.3:
            waiting.pop(source.randrange(len(waiting)))
        while len(waiting) > source.randint(0, 4):
            server.send(waiting.pop(source.randrange(len(waiting))))
            assert list(server.sender._cache.order) == list(server.engine._cache.order)


def receive(server: Server, *items: tuple[str, float | None, int | None]) -> list[object]:
    """Pixel and K of items after the engine's cache, given as key, pixel if any, and K if any."""
    features: list[Any] = []
    for key, pixel, budget in items:
        parts = {} if pixel is None else {"pixel_values": element(torch.full((4,), pixel))}
        parts |= {} if budget is None else {FIELD: plan_element(budget)}
        data, name = MultiModalKwargsItem(parts) if parts else None, f"{key} asked {budget}"
        features.append(SimpleNamespace(mm_hash=key, identifier=name, data=data))
    return [
        (
            float(item.data["pixel_values"].data[0]),
            ItemPlan.decode(item.data[FIELD].data).budget if FIELD in item.data else None,
        )
        for item in server.engine.get_and_update_features(features)
    ]


def test_two_images_that_a_peer_sends_under_one_key_keep_their_tensors() -> None:
    assert receive(Server(), ("x", 1.0, 4), ("x", 2.0, 4)) == [(1, 4), (2, 4)]
