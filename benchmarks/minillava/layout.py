"""What is in a scene and where: shapes that carry digits, and signs that carry numbers.

Knows nothing about pixels or questions. A canvas is a lattice of cells of 3 x 3 patches; a shape
fills one cell, a sign two cells side by side, one character a patch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

PATCH = 14
CELL_PATCHES = 3
CELL = PATCH * CELL_PATCHES

COLOURS: tuple[str, ...] = (
    "red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink",
)  # fmt: skip
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "cross")
SIGN = "sign"
LONGEST_NUMBER = 4
MOST_THINGS = 13
"""Shapes of the fullest scene of 4 x 4 cells."""

Style = Literal["scattered", "crowded", "signs", "ring", "bands"]
TRAINING_STYLES: tuple[Style, ...] = ("scattered", "crowded", "signs")
# Arrangements that training never draws.
UNSEEN_STYLES: tuple[Style, ...] = ("ring", "bands")

# torch's CPU generator keeps the low 32 bits of a seed, so every range stays below 2**32.
SEEDS: dict[str, range] = {
    "train": range(0, 2**31),
    "search": range(2**31, 2**31 + 2**20),
    "validation": range(2**31 + 2**20, 2**31 + 2**21),
    "test": range(2**31 + 2**21, 2**31 + 2**22),
}


@dataclass(frozen=True)
class Canvas:
    """The size of a scene in cells a side: 4 gives 12 x 12 = 144 patches, 8 gives 576."""

    cells: int = 4

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.cells * CELL_PATCHES

    @property
    def patches(self) -> int:
        """Patches in all, N."""
        return self.grid * self.grid

    @property
    def image(self) -> int:
        """Pixels a side."""
        return self.cells * CELL


@dataclass(frozen=True)
class Thing:
    """One shape: indices into `COLOURS` and `SHAPES`, its cell, and where it is drawn.

    `radius` and `shift` (x, y) are pixels; `shift` is from the centre of the cell.
    """

    colour: int
    shape: int
    digit: int
    row: int
    column: int
    radius: float
    shift: tuple[float, float]

    @property
    def name(self) -> str:
        """Colour and shape in words, unique within a scene."""
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(frozen=True)
class Sign:
    """A plate of one colour with a number: one digit a patch from patch (row, column) on."""

    colour: int
    number: tuple[int, ...]
    row: int
    column: int

    @property
    def name(self) -> str:
        """Colour and the word sign, unique within a scene."""
        return f"{COLOURS[self.colour]} {SIGN}"

    @property
    def text(self) -> str:
        """The number as it is read."""
        return "".join(map(str, self.number))


@dataclass(frozen=True)
class Layout:
    """The content of one scene."""

    style: Style
    things: tuple[Thing, ...]
    signs: tuple[Sign, ...]

    def neighbour(self, thing: Thing, down: int, right: int) -> Thing | None:
        """The shape in the cell `down` and `right` of a shape's, if there is one."""
        for other in self.things:
            if (other.row, other.column) == (thing.row + down, thing.column + right):
                return other
        return None


def training_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """The scene seed of one training batch; always one of the training range."""
    drawn = (((seed % 128) * 8 + stage) * 2**17 + step) * 2 + rank
    assert drawn in SEEDS["train"]
    return drawn


def _cells(rng: random.Random, style: Style, side: int) -> list[tuple[int, int]]:
    """Cells that a style may fill, in random order."""
    every = [(row, column) for row in range(side) for column in range(side)]
    if style == "ring":
        every = [cell for cell in every if cell[0] in (0, side - 1) or cell[1] in (0, side - 1)]
    if style == "bands":
        start = rng.randrange(2)
        across = rng.random() < 0.5
        every = [cell for cell in every if cell[0 if across else 1] % 2 == start]
    rng.shuffle(every)
    return every


def _place_signs(
    rng: random.Random, cells: list[tuple[int, int]], count: int, side: int
) -> list[Sign]:
    """Signs on two free cells side by side each, which leave `cells`."""
    signs: list[Sign] = []
    colours = rng.sample(range(len(COLOURS)), count)
    starts = [(row, column) for row in range(side) for column in range(side - 1)]
    rng.shuffle(starts)
    for row, column in starts:
        pair = [(row, column), (row, column + 1)]
        if len(signs) == count or any(cell not in cells for cell in pair):
            continue
        for cell in pair:
            cells.remove(cell)
        length = rng.randint(2, LONGEST_NUMBER)
        first = column * CELL_PATCHES + rng.randint(0, 2 * CELL_PATCHES - length)
        number = tuple(rng.randrange(10) for _ in range(length))
        line = row * CELL_PATCHES + rng.randrange(CELL_PATCHES)
        signs.append(Sign(colours[len(signs)], number, line, first))
    return signs


def draw_layout(rng: random.Random, style: Style, canvas: Canvas) -> Layout:
    """Draw one scene; few colours and shapes, so that distractors share one of the two."""
    area = canvas.cells * canvas.cells // 16
    cells = _cells(rng, style, canvas.cells)
    wanted = {"signs": 2, "scattered": rng.randint(0, 1), "crowded": 1, "ring": 1, "bands": 0}
    signs = _place_signs(rng, cells, wanted[style], canvas.cells)
    least, most = {"signs": (4, 7), "scattered": (5, 9), "crowded": (9, MOST_THINGS)}.get(
        style, (5, 8)
    )
    count = min(len(cells), rng.randint(least, most) * area)
    hues = len(COLOURS) if area > 1 else rng.randint(3, 4)
    forms = len(SHAPES) if count > 3 * hues - 1 else rng.randint(3, 4)
    colours = rng.sample(range(len(COLOURS)), hues)
    shapes = rng.sample(range(len(SHAPES)), forms)
    pairs = [(colour, shape) for colour in colours for shape in shapes]
    # Some name must stay absent, or nothing could be asked that is not there.
    count = min(count, len(pairs), len(COLOURS) * len(SHAPES) - 8)
    digits: list[int] = []
    while len(digits) < count:
        digits += rng.sample(range(10), 10)
    small, large = (9.0, 11.0) if style == "crowded" else (10.5, 13.5)
    things = [
        Thing(
            colour, shape, digit, row, column, rng.uniform(small, large),
            (rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
        )
        for (colour, shape), digit, (row, column) in zip(
            rng.sample(pairs, count), digits, cells, strict=False
        )
    ]  # fmt: skip
    return Layout(style, tuple(things), tuple(signs))


def alike(rng: random.Random, layout: Layout) -> Layout:
    """The first shapes of a layout made one form, or one colour: only the other word names them.

    Among many forms and colours a small model soon finds a shape by the last word of its name, is
    right half of the time, and stays there.
    """
    if rng.random() < 0.5:
        colours = rng.sample(range(len(COLOURS)), len(COLOURS))
        shape = rng.randrange(len(SHAPES))
        names = [(colour, shape) for colour in colours]
    else:
        colour = rng.randrange(len(COLOURS))
        names = [(colour, shape) for shape in rng.sample(range(len(SHAPES)), len(SHAPES))]
    things = tuple(
        replace(thing, colour=colour, shape=shape)
        for thing, (colour, shape) in zip(layout.things, names, strict=False)
    )
    return replace(layout, things=things)
