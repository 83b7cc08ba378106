"""Another question on an image: its tensors are neither processed nor sent a second time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.serving.unit.api.tiny_processor import LARGE, OTHER, Sender
from vllm_autoprune.serving.api.processor import PrunedProcessor
from vllm_autoprune.serving.shared.plan import FIELD

pytestmark = pytest.mark.compat


def send(sender: Sender, *images: Any, **named: Any) -> tuple[int, list[dict[str, torch.Tensor]]]:
    """How many images were processed, and the tensors of each item that was sent."""
    sent: list[dict[str, torch.Tensor]] = []
    processed = 0
    process, stock = PrunedProcessor._process, PrunedProcessor.apply

    def count(self: Any, image: Any, kwargs: Any) -> Any:
        nonlocal processed
        processed += 1
        return process(self, image, kwargs)

    def apply(self: Any, *args: Any) -> Any:
        made = stock(self, *args)
        sent.extend(item.get_data() for item in made["mm_kwargs"]["image"] if item is not None)
        return made

    with (
        patch.object(PrunedProcessor, "_process", count),
        patch.object(PrunedProcessor, "apply", apply),
    ):
        sender.send(images, **named)
    return processed, [{k: v for k, v in one.items() if k != FIELD} for one in sent]


def test_another_question_sends_the_same_tensors_without_processing(sender: Sender) -> None:
    first = send(sender, LARGE, instructions=["what is it"])
    again = send(sender, LARGE, instructions=["where is it"])
    assert (first[0], again[0]) == (1, 0)
    assert len(again[1]) == 1
    assert all(again[1][0][name].equal(tensor) for name, tensor in first[1][0].items())


def test_a_new_image_beside_a_known_one_is_processed_alone(sender: Sender, folder: Any) -> None:
    send(sender, LARGE, instructions=["what is it"])
    processed, both = send(sender, LARGE, OTHER, instructions=["how many", "how many"])
    _, fresh = send(Sender(folder, budget=8), LARGE, OTHER, instructions=["how many", "how many"])
    assert processed == 1
    for one, same in zip(both, fresh, strict=True):
        assert all(one[name].equal(tensor) for name, tensor in same.items())


def test_another_tenant_gets_tensors_of_its_own(sender: Sender) -> None:
    assert send(sender, LARGE, instructions=["what"])[0] == 1
    assert send(sender, LARGE, instructions=["where"], salt="tenant")[0] == 1


def test_an_operator_without_a_cache_of_images_has_none_here(folder: Any) -> None:
    sender = Sender(folder, budget=8)
    sender._config.get_multimodal_config().mm_processor_cache_gb = 0
    assert send(sender, LARGE, instructions=["what"])[0] == 1
    assert send(sender, LARGE, instructions=["where"])[0] == 1
