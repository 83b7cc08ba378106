"""Scenes and pages: parts do not overlap, styles differ, and pixels are where they say."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from transformers import AutoProcessor

from benchmarks.yardsticks import pages
from benchmarks.yardsticks.examples import CHECKPOINTS
from benchmarks.yardsticks.scenes import (
    CELL_PATCHES,
    CELLS,
    PATCHES,
    TRAINING_STYLES,
    UNSEEN_STYLES,
    Layout,
    Style,
    draw_layout,
    render_scenes,
)
from benchmarks.yardsticks.train_miniqwen import shrink_size

GRID = CELLS * CELL_PATCHES


def draw_layouts(style: Style, count: int = 40) -> list[Layout]:
    return [draw_layout(random.Random(seed), style) for seed in range(count)]


@pytest.mark.parametrize("style", get_args(Style))
def test_parts_share_no_cell_and_no_name(style: Style) -> None:
    assert sorted(TRAINING_STYLES + UNSEEN_STYLES) == sorted(get_args(Style))
    for layout in draw_layouts(style):
        cells = [(thing.row, thing.column) for thing in layout.things]
        for sign in layout.signs:
            columns = range(sign.column, sign.column + len(sign.number))
            assert columns.stop <= GRID
            cells += {(sign.row // CELL_PATCHES, column // CELL_PATCHES) for column in columns}
        assert len(cells) == len(set(cells))
        assert all(0 <= row < CELLS and 0 <= column < CELLS for row, column in cells)
        names = [thing.name for thing in layout.things] + [sign.name for sign in layout.signs]
        assert len(names) == len(set(names))
        assert style != "signs" or len(layout.signs) == 2
        assert style != "crowded" or len(layout.things) >= 9
        if style == "ring":
            assert all({thing.row, thing.column} & {0, 3} for thing in layout.things)


def test_shapes_are_painted_on_their_patches_middle_first() -> None:
    images, scenes = render_scenes(draw_layouts("signs", 6), CELLS, 3)
    for scene in scenes:
        for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
            assert patches[0] == (thing.row * 3 + 1) * GRID + thing.column * 3 + 1
            assert {patch // GRID // 3 for patch in patches} == {thing.row}
            assert {patch % GRID // 3 for patch in patches} == {thing.column}
    # The middle patch of every shape has more contrast than the typical background patch.
    tiles = images[0].float().view(3, 12, 14, 12, 14).permute(1, 3, 0, 2, 4).flatten(2)
    spread = tiles.flatten(0, 1).std(1)
    middles = [patches[0] for patches in scenes[0].thing_patches]
    covered = {p for part in (*scenes[0].thing_patches, *scenes[0].sign_patches) for p in part}
    free = sorted(set(range(PATCHES)) - covered)
    assert spread[middles].min() > spread[free].median()


@pytest.mark.parametrize("size", pages.SIZES)
def test_rectangles_are_cut_to_size_and_name_visual_tokens(size: pages.Size) -> None:
    layout = pages.draw_rectangle(random.Random(1), size)
    images, (scene,) = pages.render_rectangles([layout], size, 2)
    assert tuple(images.shape) == (1, 3, size.height, size.width)
    for thing, tokens in zip(layout.things, scene.thing_patches, strict=True):
        row, column = (thing.row * 3 + 1) // 2, (thing.column * 3 + 1) // 2
        assert tokens[0] == row * size.columns + column
        assert len(set(tokens)) == len(tokens) and max(tokens) < size.tokens


@pytest.mark.parametrize("style", pages.PAGE_STYLES)
@pytest.mark.parametrize("most", [5, len(pages.WORDS)])
def test_words_numbers_and_places_of_a_page_are_unique(style: pages.PageStyle, most: int) -> None:
    sizes = (*pages.SIZES, *pages.UNSEEN_SIZES)
    for seed in range(60):
        page = pages.draw_page(random.Random(seed), style, sizes[seed % len(sizes)], most)
        assert len({word.word for word in page.words}) == len(page.words) < len(pages.WORDS)
        assert len(page.words) <= most
        assert len({number.value for number in page.numbers}) == len(page.numbers)
        parts: list[pages.Word | pages.Number] = [*page.words, *page.numbers]
        places = [(part.row, part.column) for part in parts]
        assert len(set(places)) == len(places)
        assert all(0 <= r < page.size.rows and 0 <= c < page.size.columns for r, c in places)
        for number in page.numbers:
            assert number.label is not None and number.row == number.label.row
            if style == "list":
                assert number.head is None and number.column == number.label.column + 1
            else:
                assert number.head is not None and number.column == number.head.column


def test_a_word_changes_the_pixels_of_its_token() -> None:
    words = [(pages.Word(word, 2, 4), pages.Word(9, 5, 8)) for word in (3, 8)]
    page, other = (pages.Page("list", pages.Size(6, 9), pair, ()) for pair in words)
    images, centres = pages.render_pages([page, page], 1)
    changed, _ = pages.render_pages([other, page], 1)
    rows, columns = (images != changed)[0].any(0).nonzero(as_tuple=True)
    assert len(rows) > 20
    # Lines are shifted by up to one pixel.
    assert rows.min() >= 2 * pages.TOKEN - 1 and rows.max() <= 3 * pages.TOKEN
    assert columns.min() >= 4 * pages.TOKEN - 1 and columns.max() <= 5 * pages.TOKEN
    assert abs(centres[0][0][0] - 4.5 * pages.TOKEN) <= 1
    assert torch.equal(images[1], changed[1])


@pytest.mark.parametrize("divisor", [1, 2, 4, 8, 16])
def test_resizing_and_patches_are_those_of_the_processor(divisor: int) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINTS["miniqwen"]).image_processor
    for size in (*pages.SIZES, *pages.UNSEEN_SIZES):
        budget = size.tokens // divisor
        seen = shrink_size(size, budget)
        assert seen.tokens <= budget
        images, _ = pages.render_pages([pages.draw_page(random.Random(3), "table", size)], 3)
        limits = {
            "shortest_edge": pages.TOKEN * pages.TOKEN,
            "longest_edge": budget * pages.TOKEN * pages.TOKEN,
        }
        inputs = processor(images[0], size=limits, return_tensors="pt")
        grid = [[1, seen.rows * pages.MERGE, seen.columns * pages.MERGE]]
        assert inputs["image_grid_thw"].tolist() == grid
        frames = inputs["pixel_values"].unflatten(1, (3, 2, -1))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        patches = pages.split_patches(pages.resize_images(images, seen))[0].flatten(0, 1).float()
        difference = (patches - frames[:, :, 0].flatten(1)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.08 and difference.mean() < 0.01
