"""Layouts: parts do not overlap, seed ranges are disjoint, styles have their properties."""

from __future__ import annotations

import random
from itertools import combinations
from typing import get_args

import pytest

from benchmarks.minillava.layout import (
    CELL_PATCHES,
    SEEDS,
    TRAINING_STYLES,
    UNSEEN_STYLES,
    Canvas,
    Layout,
    Style,
    draw_layout,
)

STYLES: tuple[Style, ...] = get_args(Style)


def _many(style: Style, canvas: Canvas, count: int = 40) -> list[Layout]:
    return [draw_layout(random.Random(seed), style, canvas) for seed in range(count)]


def test_every_style_is_either_for_training_or_unseen() -> None:
    assert sorted(TRAINING_STYLES + UNSEEN_STYLES) == sorted(STYLES)


@pytest.mark.parametrize("cells", [4, 8])
@pytest.mark.parametrize("style", STYLES)
def test_parts_share_no_cell_and_stay_inside(style: Style, cells: int) -> None:
    canvas = Canvas(cells)
    for layout in _many(style, canvas):
        cells_used = [(thing.row, thing.column) for thing in layout.things]
        for sign in layout.signs:
            assert sign.column + len(sign.number) <= canvas.grid
            columns = range(sign.column, sign.column + len(sign.number))
            cells_used += {(sign.row // CELL_PATCHES, column // CELL_PATCHES) for column in columns}
        assert len(cells_used) == len(set(cells_used))
        assert all(0 <= row < cells and 0 <= column < cells for row, column in cells_used)


@pytest.mark.parametrize("style", STYLES)
def test_names_are_unique_within_a_scene(style: Style) -> None:
    for layout in _many(style, Canvas()):
        names = [thing.name for thing in layout.things] + [sign.name for sign in layout.signs]
        assert len(names) == len(set(names))


def test_crowded_scenes_hold_more_than_scattered_ones() -> None:
    crowded = [len(layout.things) for layout in _many("crowded", Canvas())]
    scattered = [len(layout.things) for layout in _many("scattered", Canvas())]

    assert min(crowded) >= 9 >= max(scattered)


def test_a_ring_leaves_the_middle_empty() -> None:
    for layout in _many("ring", Canvas()):
        assert all({thing.row, thing.column} & {0, 3} for thing in layout.things)


def test_seed_ranges_never_touch_and_fit_the_generator() -> None:
    for one, other in combinations(SEEDS.values(), 2):
        assert one.stop <= other.start or other.stop <= one.start
    assert max(seeds.stop for seeds in SEEDS.values()) <= 2**32


def test_neighbours_are_beside_each_other() -> None:
    (layout,) = _many("crowded", Canvas(), 1)
    pairs = 0
    for thing in layout.things:
        right = layout.neighbour(thing, 0, 1)
        if right is not None:
            pairs += 1
            assert (right.row, right.column) == (thing.row, thing.column + 1)
            assert layout.neighbour(right, 0, -1) == thing
    assert pairs
