"""Images: text stands where the page says, scenes are cut to size, resizing is the processor's."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoProcessor

from benchmarks.miniqwen.pages import Page, Word, draw_page
from benchmarks.miniqwen.render import (
    render_pages,
    render_scenes,
    resize_images,
    split_patches,
)
from benchmarks.miniqwen.scenes import draw_scene
from benchmarks.miniqwen.sizes import SIZES, TOKEN, Size, shrink_size

SIZE = Size(6, 9)


def test_a_word_changes_the_pixels_of_its_token() -> None:
    page = Page("list", SIZE, (Word(3, 2, 4), Word(9, 5, 8)), ())
    other = Page("list", SIZE, (Word(8, 2, 4), Word(9, 5, 8)), ())
    images, places = render_pages([page, page], 1)
    changed, _ = render_pages([other, page], 1)
    rows, columns = (images != changed)[0].any(0).nonzero(as_tuple=True)
    assert len(rows) > 20
    # Lines are shifted by up to one pixel.
    assert rows.min() >= 2 * TOKEN - 1 and rows.max() <= 3 * TOKEN
    assert columns.min() >= 4 * TOKEN - 1 and columns.max() <= 5 * TOKEN
    assert abs(places[0][0].x - 4.5 * TOKEN) <= 1
    assert torch.equal(images[1], changed[1])


def test_scenes_of_all_sizes_show_their_shapes() -> None:
    for size in SIZES:
        layout = draw_scene(random.Random(1), size)
        images, scenes = render_scenes([layout], size, 2)
        assert tuple(images.shape) == (1, 3, size.height, size.width)
        for thing, tokens in zip(layout.things, scenes[0].thing_patches, strict=True):
            row, column = (thing.row * 3 + 1) // 2, (thing.column * 3 + 1) // 2
            assert tokens[0] == row * size.columns + column
            assert len(set(tokens)) == len(tokens) and max(tokens) < size.tokens


def test_resized_patches_are_those_of_the_processor(checkpoint: Path) -> None:
    images, _ = render_pages([draw_page(random.Random(3), "table", SIZE)], 3)
    processor = AutoProcessor.from_pretrained(checkpoint).image_processor
    for budget in (SIZE.tokens, SIZE.tokens // 2, SIZE.tokens // 8):
        seen = shrink_size(SIZE, budget)
        limits = {"shortest_edge": TOKEN * TOKEN, "longest_edge": budget * TOKEN * TOKEN}
        values = processor(images[0], size=limits, return_tensors="pt")["pixel_values"]
        frames = values.unflatten(1, (3, 2, -1))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        own = split_patches(resize_images(images, seen))[0].flatten(0, 1).float()
        difference = (own - frames[:, :, 0].flatten(1)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.08 and difference.mean() < 0.01
