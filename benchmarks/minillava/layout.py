"""Scene layouts: shapes that carry digits and signs that carry numbers, on a grid of cells.

A canvas is a square grid of cells of 3 x 3 patches each. A shape occupies one cell; a sign occupies
two cells side by side and shows one character per patch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

PATCH = 14
CELL_PATCHES = 3
CELL = PATCH * CELL_PATCHES

COLOURS: tuple[str, ...] = (
    "red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink",
)  # fmt: skip
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "cross")
SIGN = "sign"
MAX_DIGITS = 4
"""Digits of the longest number on a sign."""
MAX_SHAPES = 13
"""Shapes in the fullest scene of 4 x 4 cells."""

NEIGHBOURS: tuple[tuple[int, int], ...] = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""(rows, columns) from a cell to the cells on its left, on its right, above and below."""

Style = Literal["scattered", "crowded", "signs", "ring", "bands"]
TRAINING_STYLES: tuple[Style, ...] = ("scattered", "crowded", "signs")
# Arrangements that occur in the test split only.
UNSEEN_STYLES: tuple[Style, ...] = ("ring", "bands")

# torch's CPU generator keeps the low 32 bits of a seed, so all ranges stay below 2**32.
SEEDS: dict[str, range] = {
    "train": range(0, 2**31),
    "search": range(2**31, 2**31 + 2**20),
    "validation": range(2**31 + 2**20, 2**31 + 2**21),
    "test": range(2**31 + 2**21, 2**31 + 2**22),
}


@dataclass(frozen=True)
class Canvas:
    """The size of a scene in cells per side: 4 gives 12 x 12 = 144 patches, 8 gives 576."""

    cells: int = 4

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.cells * CELL_PATCHES

    @property
    def patches(self) -> int:
        """Patches in total, N."""
        return self.grid * self.grid

    @property
    def image(self) -> int:
        """Pixels per side."""
        return self.cells * CELL


@dataclass(frozen=True)
class Thing:
    """One shape: indices into `COLOURS` and `SHAPES`, a digit, a cell, and the exact placement.

    `radius` and `shift` (x, y) are in pixels; `shift` is relative to the centre of the cell.
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
        """Colour and form, such as "red square"; unique within a scene."""
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(frozen=True)
class Sign:
    """A coloured plate with a number: one digit per patch, the first at patch (row, column)."""

    colour: int
    number: tuple[int, ...]
    row: int
    column: int

    @property
    def name(self) -> str:
        """Colour and the word "sign"; unique within a scene."""
        return f"{COLOURS[self.colour]} {SIGN}"

    @property
    def text(self) -> str:
        """The digits of the number as one string."""
        return "".join(map(str, self.number))


@dataclass(frozen=True)
class Layout:
    """The content of one scene."""

    style: Style
    things: tuple[Thing, ...]
    signs: tuple[Sign, ...]

    def neighbour(self, thing: Thing, down: int, right: int) -> Thing | None:
        """The shape `down` rows and `right` columns away from a shape, if that cell has one."""
        for other in self.things:
            if (other.row, other.column) == (thing.row + down, thing.column + right):
                return other
        return None


def _available_cells(rng: random.Random, style: Style, side: int) -> list[tuple[int, int]]:
    """The cells that a style may use, in random order."""
    cells = [(row, column) for row in range(side) for column in range(side)]
    if style == "ring":
        cells = [cell for cell in cells if cell[0] in (0, side - 1) or cell[1] in (0, side - 1)]
    if style == "bands":
        start = rng.randrange(2)
        horizontal = rng.random() < 0.5
        cells = [cell for cell in cells if cell[0 if horizontal else 1] % 2 == start]
    rng.shuffle(cells)
    return cells


def _place_signs(
    rng: random.Random, cells: list[tuple[int, int]], count: int, side: int
) -> list[Sign]:
    """Place signs on pairs of free cells side by side, and remove those cells from `cells`."""
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
        length = rng.randint(2, MAX_DIGITS)
        left = column * CELL_PATCHES + rng.randint(0, 2 * CELL_PATCHES - length)
        number = tuple(rng.randrange(10) for _ in range(length))
        top = row * CELL_PATCHES + rng.randrange(CELL_PATCHES)
        signs.append(Sign(colours[len(signs)], number, top, left))
    return signs


def draw_layout(rng: random.Random, style: Style, canvas: Canvas) -> Layout:
    """Draw a random scene of few colours and forms, so that most distractors share one of them."""
    area = canvas.cells * canvas.cells // 16
    cells = _available_cells(rng, style, canvas.cells)
    sign_counts = {"signs": 2, "scattered": rng.randint(0, 1), "crowded": 1, "ring": 1, "bands": 0}
    signs = _place_signs(rng, cells, sign_counts[style], canvas.cells)
    fewest, most = {"signs": (4, 7), "scattered": (5, 9), "crowded": (9, MAX_SHAPES)}.get(
        style, (5, 8)
    )
    count = min(len(cells), rng.randint(fewest, most) * area)
    colour_count = len(COLOURS) if area > 1 else rng.randint(3, 4)
    form_count = len(SHAPES) if count > 3 * colour_count - 1 else rng.randint(3, 4)
    colours = rng.sample(range(len(COLOURS)), colour_count)
    shapes = rng.sample(range(len(SHAPES)), form_count)
    pairs = [(colour, shape) for colour in colours for shape in shapes]
    # At least one name must stay unused for the questions whose answer is "no".
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
