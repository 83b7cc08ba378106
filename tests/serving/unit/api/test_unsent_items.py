"""Images of refused requests are sent with the next request that has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_autoprune.serving.api.unsent_items import UnsentItems, collect_tensors

pytestmark = pytest.mark.compat


class ApiServer:
    """vLLM's two caches of processed images, and the steps of a request between them."""

    def __init__(self) -> None:
        from vllm.multimodal.cache import (
            LruKeyReplicatedReceiverCache,
            LruKeyReplicatedSenderCache,
        )

        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1)
        )
        self.sender = LruKeyReplicatedSenderCache(config)
        self.engine = LruKeyReplicatedReceiverCache(config)
        self.unsent = UnsentItems()

    def render(self, *keys: str, fails: bool = False) -> Any:
        """A request with images of these identities, as the processor renders it."""
        with self.unsent.rendering(self.sender, keys) as tensors:
            cached = [self.sender.is_cached_item(key) for key in keys]
            items = [
                self.sender.get_and_update_item(None if known else (_item(), []), key)[0]
                for key, known in zip(keys, cached, strict=True)
            ]
            if fails:
                raise RuntimeError("no place for the image in the prompt")
            tensors |= collect_tensors({"image": keys}, {"image": items})
        features = [
            SimpleNamespace(mm_hash=key, identifier=key, data=item)
            for key, item in zip(keys, items, strict=True)
        ]
        return SimpleNamespace(features=features, tensors=tensors)

    def send(self, request: Any) -> None:
        """Raises MultiModalCacheMissError, which vLLM answers by 500."""
        self.unsent.hand_over(request.features, request.tensors)
        self.engine.get_and_update_features(request.features)


def _item() -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    pixels = MultiModalFieldElem(torch.zeros(4), MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": pixels})


def test_images_of_a_refused_request_are_processed_again() -> None:
    server = ApiServer()
    refused = server.render("a", "b")
    del refused
    server.send(server.render("a", "b"))


def test_images_of_a_request_refused_later_are_sent_by_the_one_rendered_meanwhile() -> None:
    server = ApiServer()
    refused, meanwhile = server.render("a"), server.render("a")
    assert meanwhile.features[0].data is None
    del refused
    server.send(meanwhile)


def test_images_of_a_request_that_is_kept_alive_after_its_refusal_are_sent() -> None:
    server = ApiServer()
    refused = server.render("a")
    server.send(server.render("a"))
    assert refused.features[0].data is not None


def test_a_request_that_overtakes_the_first_one_sends_the_tensors() -> None:
    server = ApiServer()
    first, second = server.render("a"), server.render("a")
    server.send(second)
    server.send(first)
    assert server.render("a").features[0].data is None


def test_images_that_the_engine_has_are_sent_once() -> None:
    server = ApiServer()
    server.send(server.render("a", "a"))
    again = server.render("a")
    server.unsent.hand_over(again.features, again.tensors)
    assert again.features[0].data is None


def test_tensors_live_no_longer_than_the_requests_that_may_send_them() -> None:
    server = ApiServer()
    for i in range(100):
        server.render(f"{i}")
    server.send(server.render("a"))
    assert not server.unsent._items
    assert not server.unsent._dropped


def test_images_of_a_request_that_fails_while_it_is_rendered_are_processed_again() -> None:
    server = ApiServer()
    server.send(server.render("a"))
    with pytest.raises(RuntimeError):
        server.render("a", "b", fails=True)
    server.send(server.render("a", "b"))
    assert server.render("b").features[0].data is None
