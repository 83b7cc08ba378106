"""Layouts: nothing overlaps, seeds never meet, arrangements are what they are called."""

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
    alike,
    draw_layout,
    training_seed,
)

STYLES: tuple[Style, ...] = get_args(Style)


def _many(style: Style, canvas: Canvas, count: int = 40) -> list[Layout]:
    return [draw_layout(random.Random(seed), style, canvas) for seed in range(count)]


def test_every_style_is_either_trained_on_or_unseen() -> None:
    assert sorted(TRAINING_STYLES + UNSEEN_STYLES) == sorted(STYLES)


@pytest.mark.parametrize("cells", [4, 8])
@pytest.mark.parametrize("style", STYLES)
def test_parts_share_no_cell_and_stay_inside(style: Style, cells: int) -> None:
    canvas = Canvas(cells)
    for layout in _many(style, canvas):
        taken = [(thing.row, thing.column) for thing in layout.things]
        for sign in layout.signs:
            assert sign.column + len(sign.number) <= canvas.grid
            columns = range(sign.column, sign.column + len(sign.number))
            taken += {(sign.row // CELL_PATCHES, column // CELL_PATCHES) for column in columns}
        assert len(taken) == len(set(taken))
        assert all(0 <= row < cells and 0 <= column < cells for row, column in taken)


@pytest.mark.parametrize("style", STYLES)
def test_names_single_one_part_out(style: Style) -> None:
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


def test_training_seeds_differ_by_seed_stage_step_and_rank() -> None:
    drawn = [
        training_seed(seed, stage, step, rank)
        for seed in (0, 7, 127)
        for stage in range(8)
        for step in (0, 1, 2**17 - 1)
        for rank in range(2)
    ]

    assert len(set(drawn)) == len(drawn)
    assert all(seed in SEEDS["train"] for seed in drawn)


def test_neighbours_are_beside_each_other() -> None:
    (layout,) = _many("crowded", Canvas(), 1)
    found = 0
    for thing in layout.things:
        right = layout.neighbour(thing, 0, 1)
        if right is not None:
            found += 1
            assert (right.row, right.column) == (thing.row, thing.column + 1)
            assert layout.neighbour(right, 0, -1) == thing
    assert found


def test_alike_shapes_differ_in_one_word_only_and_stay_where_they_are() -> None:
    kinds = set()
    for seed, layout in enumerate(_many("crowded", Canvas())):
        found = alike(random.Random(seed), layout)
        shapes = {thing.shape for thing in found.things}
        colours = {thing.colour for thing in found.things}
        kinds.add((len(shapes) == 1, len(colours) == 1))
        assert sorted((len(shapes), len(colours))) == [1, len(found.things)]
        assert len(found.things) in (5, 8)
        assert [(t.row, t.column, t.digit) for t in found.things] == [
            (t.row, t.column, t.digit) for t in layout.things[: len(found.things)]
        ]
        assert found.signs == layout.signs
    assert kinds == {(True, False), (False, True)}
