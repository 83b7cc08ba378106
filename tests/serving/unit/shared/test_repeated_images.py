"""Tensors of one image in several items of a request: sent once, restored, never mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.repeated_images import (
    drop_repeated_tensors,
    wrap_get_and_update_features,
)

pytestmark = pytest.mark.compat

CAT, DOG = torch.full((4,), 1.0), torch.full((4,), 2.0)
KEYS = {1.0: (1, 1), 2.0: (2, 2)}


def item(pixels: torch.Tensor, budget: int = 4) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    plan = ItemPlan(budget, KEYS[float(pixels[0])]).encode()
    field = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(pixels, field),
            FIELD: MultiModalFieldElem(plan, field),
        }
    )


def feature(identity: str, data: Any) -> Any:
    return SimpleNamespace(mm_hash=identity, identifier=identity, data=data)


class Engine:
    """vLLM's receiver cache, with the wrapper around its method."""

    def __init__(self) -> None:
        from vllm.multimodal.cache import LruKeyReplicatedReceiverCache

        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1)
        )
        self.cache = LruKeyReplicatedReceiverCache(config)
        stock = LruKeyReplicatedReceiverCache.get_and_update_features
        stock = getattr(stock, "__wrapped__", stock)
        self._receive = wrap_get_and_update_features(stock)

    def receive(self, *features: Any) -> list[Any]:
        return [one.data for one in self._receive(self.cache, list(features))]


def pixels_of(data: Any) -> torch.Tensor:
    return data["pixel_values"].data


def budget_of(data: Any) -> int:
    return ItemPlan.decode(data[FIELD].data).budget


def test_the_first_item_brings_the_tensors_of_the_others() -> None:
    sent = [
        feature("core", item(CAT, 3)),
        feature("delta", item(CAT, 1)),
        feature("dog", item(DOG)),
    ]
    drop_repeated_tensors(sent, {"core": "cat", "delta": "cat", "dog": "dog"})
    assert [set(one.data) for one in sent] == [
        {"pixel_values", FIELD},
        {FIELD},
        {"pixel_values", FIELD},
    ]
    received = Engine().receive(*sent)
    assert [budget_of(data) for data in received] == [3, 1, 4]
    assert [float(pixels_of(data)[0]) for data in received] == [1, 1, 2]


def test_the_tensors_of_an_item_that_the_engine_has_are_used() -> None:
    engine = Engine()
    engine.receive(feature("dog", item(DOG)), feature("core", item(CAT, 3)))
    known, delta = feature("core", None), feature("delta", item(CAT, 1))
    sent = [feature("dog", None), known, delta]
    drop_repeated_tensors(sent, {"core": "cat", "delta": "cat", "dog": "dog"})
    received = engine.receive(*sent)
    assert pixels_of(received[2]).equal(CAT) and budget_of(received[2]) == 1
    # The receiver counts a whole item, as the sender does.
    (again,) = engine.receive(feature("delta", None))
    assert pixels_of(again).equal(CAT)


def test_an_item_of_another_image_gives_no_tensors() -> None:
    from vllm.multimodal.cache import MultiModalCacheMissError

    delta = feature("delta", item(CAT, 1))
    drop_repeated_tensors([feature("core", None), delta], {"core": "cat", "delta": "cat"})
    with pytest.raises(MultiModalCacheMissError) as error:
        Engine().receive(feature("dog", item(DOG)), delta)
    assert error.value.mm_hashes == ["dog", "delta"]


def test_images_that_the_receiver_does_not_restore_are_sent_whole() -> None:
    sent = [feature("core", item(CAT, 3)), feature("delta", item(CAT, 1))]
    drop_repeated_tensors(sent, {})
    assert all(set(one.data) == {"pixel_values", FIELD} for one in sent)


def test_a_plan_that_a_client_made_fails_its_request_alone() -> None:
    from vllm.multimodal.cache import MultiModalCacheMissError
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    for row in (torch.zeros(3), ItemPlan(4, (0, 0)).encode()):
        forged = MultiModalKwargsItem({FIELD: MultiModalFieldElem(row, MultiModalBatchedField())})
        engine = Engine()
        with pytest.raises(MultiModalCacheMissError):
            engine.receive(feature("cat", item(CAT)), feature("forged", forged))
        assert pixels_of(engine.receive(feature("cat", item(CAT)))[0]).equal(CAT)
