"""Processed tensors of recent images: what is kept, what is dropped, what memory it holds."""

from __future__ import annotations

import pytest
import torch

from vllm_autoprune.serving.api.processed_images import ProcessedImage, ProcessedImages

pytestmark = pytest.mark.compat

FLOATS = 100
BYTES = 4 * FLOATS


def image(pixels: torch.Tensor | list[torch.Tensor] | None = None) -> ProcessedImage:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    pixels = torch.zeros(FLOATS) if pixels is None else pixels
    element = MultiModalFieldElem(pixels, MultiModalBatchedField())
    return ProcessedImage(MultiModalKwargsItem({"pixel_values": element}), "digest")


def test_the_least_recently_used_image_is_dropped_first() -> None:
    images = ProcessedImages(2 * BYTES)
    images.remember("a", image())
    images.remember("b", image())
    assert images.find("a") is not None
    images.remember("c", image())
    assert [images.find(name) is not None for name in "abc"] == [True, False, True]


def test_an_image_larger_than_the_bound_drops_no_other() -> None:
    images = ProcessedImages(2 * BYTES)
    images.remember("a", image())
    images.remember("large", image([torch.zeros(FLOATS)] * 3))
    assert images.find("a") is not None and images.find("large") is None


def test_an_image_that_is_stored_again_counts_once() -> None:
    images = ProcessedImages(2 * BYTES)
    for _ in range(5):
        images.remember("a", image())
    images.remember("b", image())
    assert images.find("a") is not None and images.find("b") is not None


def test_nothing_is_kept_without_room() -> None:
    images = ProcessedImages(0)
    images.remember("a", image())
    assert images.find("a") is None
