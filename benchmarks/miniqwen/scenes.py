"""Scene layouts on rectangles of cells, with mini-LLaVA's shapes."""

from __future__ import annotations

import random

from benchmarks.minillava.layout import COLOURS, SHAPES, Layout, Thing
from benchmarks.miniqwen.render import scene_cells
from benchmarks.miniqwen.sizes import Size

_FEWEST = 4
MOST_SHAPES = 14
"""Shapes in the fullest scene."""


def draw_scene(rng: random.Random, size: Size, most: int = MOST_SHAPES) -> Layout:
    """Draw a scene of few colours and forms, so that most distractors share one of them."""
    rows, columns = scene_cells(size)
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    rng.shuffle(cells)
    colours = rng.sample(range(len(COLOURS)), rng.randint(3, 4))
    shapes = rng.sample(range(len(SHAPES)), rng.randint(3, 4))
    pairs = [(colour, shape) for colour in colours for shape in shapes]
    # One name stays unused for the questions whose answer is "no".
    count = min(most, rng.randint(_FEWEST, MOST_SHAPES), len(pairs) - 1, len(cells))
    digits: list[int] = []
    while len(digits) < count:
        digits += rng.sample(range(10), 10)
    things = tuple(
        Thing(
            colour, shape, digit, row, column, rng.uniform(10.0, 13.5),
            (rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
        )
        for (colour, shape), digit, (row, column) in zip(
            rng.sample(pairs, count), digits, cells, strict=False
        )
    )  # fmt: skip
    return Layout("scattered", things, ())
