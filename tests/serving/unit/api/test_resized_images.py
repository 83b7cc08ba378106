"""Sizes of resized images: at most K tokens by the processor's arithmetic, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.glm4v.image_processing_glm4v import smart_resize
from vllm.multimodal.parse import ImageProcessorItems, ImageSize, MultiModalDataItems

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.pruning_choice import ImageChoice
from vllm_autoprune.serving.api.resized_images import choose_sizes, resize_images
from vllm_autoprune.serving.models import glm4v
from vllm_autoprune.serving.models.qwen_vl import shrink_to_budget
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount

UNIT = 28


@dataclass(frozen=True)
class Inputs:
    """The fields of vLLM's ``ProcessorInputs`` that are read."""

    mm_data_items: Any = None
    hf_processor_mm_kwargs: dict[str, object] = field(default_factory=dict)


def qwen(least: int = 1) -> tuple[Any, Placeholders]:
    """A model of 28 x 28 pixels a merged token, whose processor makes at least so many."""
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    info: Any = SimpleNamespace(
        get_hf_config=lambda: SimpleNamespace(vision_config=vision),
        get_hf_processor=lambda: SimpleNamespace(image_processor=SimpleNamespace(resample=3)),
    )

    def count(_: object, size: ImageSize, __: object) -> TokenCount:
        return TokenCount(max(size.width // UNIT * (size.height // UNIT), least))

    return info, Placeholders(count, lambda _: TokenCount(1), lambda _: 0, resize=shrink_to_budget)


def choose(width: int, height: int, budget: int, least: int = 1, **fields: Any) -> ImageChoice:
    info, placeholders = qwen(least)
    choice = ImageChoice(budget, 10**6, "resized", identity="state", **fields)
    inputs: Any = Inputs()
    (chosen,) = choose_sizes(info, placeholders, inputs, [ImageSize(width, height)], [choice])
    return chosen


@given(st.integers(28, 4000), st.integers(28, 4000), st.integers(1, 200))
def test_a_resized_image_has_at_most_k_tokens(width: int, height: int, budget: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    chosen = choose(width, height, budget)
    assert chosen.resized is not None
    assert 1 <= chosen.kept <= budget
    assert chosen.kept * UNIT**2 == chosen.resized[0] * chosen.resized[1]


@given(st.integers(28, 4000), st.integers(28, 4000), st.integers(1, 200))
def test_glm_s_processor_leaves_a_resized_image_as_it_is(
    width: int, height: int, budget: int
) -> None:
    """It counts the pixels of two frames, of which an image is one."""
    if max(width, height) > 200 * min(width, height):
        return
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    info: Any = SimpleNamespace(get_hf_config=lambda: SimpleNamespace(vision_config=vision))
    smaller = glm4v.shrink_to_budget(info, ImageSize(width, height), budget)
    sides = smaller.height, smaller.width
    assert 1 <= sides[0] * sides[1] // UNIT**2 <= budget
    if max(sides) <= 200 * min(sides):
        most = 2 * 10**9
        assert smart_resize(2, *sides, factor=UNIT, min_pixels=1, max_pixels=most) == sides


def test_the_sides_keep_their_ratio() -> None:
    chosen = choose(640, 480, 48)
    assert chosen.resized == (8 * UNIT, 6 * UNIT)
    assert chosen.kept == 48


def test_a_budget_below_the_processor_s_least_is_refused() -> None:
    with pytest.raises(RequestError, match="makes at least 4 tokens -> ask for 4 or more"):
        choose(640, 480, 3, least=4)


def test_other_choices_stay_as_they_are() -> None:
    info, placeholders = qwen()
    fixed = Placeholders(placeholders.count, placeholders.count_largest, placeholders.token)
    size = ImageSize(640, 480)
    for choice, rules in (
        (ImageChoice(8, 64, "random"), placeholders),
        (ImageChoice(64, 64, "resized"), placeholders),
        (ImageChoice(8, 64, "resized"), fixed),  # the worker pools its tokens
    ):
        inputs: Any = Inputs()
        assert choose_sizes(info, rules, inputs, [size], [choice]) == (choice,)


def items(*images: object) -> Any:
    listed: list[Any] = list(images)
    return Inputs(MultiModalDataItems({"image": ImageProcessorItems(listed)}))


def test_only_images_with_a_size_are_resized() -> None:
    info, _ = qwen()
    source = items(Image.new("RGB", (50, 40)), Image.new("L", (50, 40)), None)
    images = resize_images(info, source, [None, (28, 56), (28, 28)]).mm_data_items["image"]
    assert [image and (image.size, image.mode) for image in map(images.get, range(3))] == [
        ((50, 40), "RGB"),
        ((28, 56), "RGB"),
        None,
    ]
    assert resize_images(info, source, [None, None, None]) is source


def test_an_array_cannot_be_resized() -> None:
    info, _ = qwen()
    with pytest.raises(RequestError, match="send it as a picture"):
        resize_images(info, items(numpy.zeros((40, 50, 3))), [(28, 28)])
