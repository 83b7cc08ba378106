"""Scenes: shapes that carry digits and signs that carry numbers, drawn at random and rendered.

A canvas is a square of cells of 3 x 3 patches each. A shape occupies one cell; a sign occupies two
cells side by side and shows one character per patch. Rendering is vectorised in torch, because
every training step draws new scenes.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.requests import draw_picture

PATCH = 14
CELL_PATCHES = 3
CELL = PATCH * CELL_PATCHES
CELLS = 4
"""Cells per side of an image of mini-LLaVA."""
GRID = CELLS * CELL_PATCHES
PATCHES = GRID**2
"""N of an image of mini-LLaVA."""

_TABLES = tomllib.loads(
    Path(__file__).with_name("pictures.toml").read_text(encoding="utf-8")
)
GLYPHS = {
    name: torch.tensor(
        [[[float(bit) for bit in row] for row in glyph.split()] for glyph in glyphs]
    )
    for name, glyphs in _TABLES["glyphs"].items()
}
"""Dots (G, 7, 5) of all digits, and of all capital letters."""
COLOURS: tuple[str, ...] = tuple(_TABLES["colours"])
SHAPES: tuple[str, ...] = tuple(_TABLES["shapes"])
WORDS: tuple[str, ...] = tuple(_TABLES["words"])
_PAINTS = (*_TABLES["colours"].values(), *_TABLES["greys"].values())
_CHARACTERS = torch.cat((GLYPHS["digits"], GLYPHS["letters"]))
RADII = (8.5, 13.5)
"""Smallest and largest radius, in pixels, of marks and of the shapes in scenes with marks."""
MAX_DIGITS = 4
"""Digits of the longest number on a sign."""
MAX_SHAPES = 13
"""Number of shapes in the fullest scene."""

NEIGHBOURS = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""Steps (rows, columns) from a cell to its neighbours on the left, on the right, above and
below."""

Style = Literal["scattered", "crowded", "signs", "ring", "bands"]
TRAINING_STYLES: tuple[Style, ...] = ("scattered", "crowded", "signs")
UNSEEN_STYLES: tuple[Style, ...] = ("ring", "bands")
"""Arrangements that occur in the test split only."""

# CLIP's normalisation of red, green and blue.
_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)

# Half the width and half the height of a digit, in pixels.
_GLYPH_X = 4.2
_GLYPH_Y = 5.8
# Forms of marks: star, ring, bar, moon.
_MARKS = 4
# A patch belongs to a shape that covers at least this fraction of it.
_COVERAGE = 0.15


@dataclass(frozen=True)
class Thing:
    """One shape: indices into `COLOURS` and `SHAPES`, a digit, a cell, and the exact placement.

    `radius` and `shift` (x, y) are in pixels; `shift` is relative to the centre of the cell.
    `opacity` is the share of paint. A mark is a grey thing without a name that carries a letter;
    its indices continue after those of colours, shapes and digits.
    """

    colour: int
    shape: int
    digit: int
    row: int
    column: int
    radius: float
    shift: tuple[float, float]
    opacity: float = 1.0

    @classmethod
    def draw_mark(cls, rng: random.Random, row: int, column: int) -> Thing:
        """Draw a random mark."""
        grey = rng.randrange(len(COLOURS), len(_PAINTS))
        form = len(SHAPES) + rng.randrange(_MARKS)
        shift = (rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5))
        letter = rng.randrange(len(GLYPHS["digits"]), len(_CHARACTERS))
        return cls(grey, form, letter, row, column, rng.uniform(*RADII), shift)

    @property
    def letter(self) -> int | None:
        """Index of a mark's letter, 0 to 25; None for a shape."""
        return self.digit - len(GLYPHS["digits"]) if self.shape >= len(SHAPES) else None

    @property
    def name(self) -> str:
        """Colour and form, such as "red square"; unique within a scene."""
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"

    @property
    def name_with_article(self) -> str:
        """The name with its article, such as "a red square" or "an orange circle"."""
        article = "an" if self.name[0] in "aeiou" else "a"
        return f"{article} {self.name}"


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
        return f"{COLOURS[self.colour]} sign"

    @property
    def text(self) -> str:
        """The digits of the number as one string."""
        return "".join(map(str, self.number))


@dataclass(frozen=True)
class Scene:
    """Shapes, signs and marks; no question is about marks. `patches` is empty until it is rendered.

    The first patch of a shape is the middle of its cell; a sign's patches are in reading order.
    """

    things: tuple[Thing, ...]
    signs: tuple[Sign, ...] = ()
    marks: tuple[Thing, ...] = ()
    patches: Mapping[Thing | Sign, tuple[int, ...]] = field(default_factory=dict)

    def neighbour(self, thing: Thing, rows: int, columns: int) -> Thing | None:
        """The shape `rows` down and `columns` to the right of `thing`, or None."""
        for other in self.things:
            if (other.row, other.column) == (thing.row + rows, thing.column + columns):
                return other
        return None

    @classmethod
    def draw(cls, rng: random.Random, style: Style) -> Scene:
        """Draw a scene of few colours and forms, so that most distractors share one of them."""
        cells = [(row, column) for row in range(CELLS) for column in range(CELLS)]
        if style == "ring":
            cells = [cell for cell in cells if {0, CELLS - 1} & {*cell}]
        if style == "bands":
            start = rng.randrange(2)
            axis = 0 if rng.random() < 0.5 else 1
            cells = [cell for cell in cells if cell[axis] % 2 == start]
        rng.shuffle(cells)
        # Signs are placed on pairs of free cells side by side.
        scattered = rng.randint(0, 1)
        counts = {
            "signs": 2,
            "scattered": scattered,
            "crowded": 1,
            "ring": 1,
            "bands": 0,
        }
        colours = rng.sample(range(len(COLOURS)), counts[style])
        signs = list[Sign]()
        starts = [(row, column) for row in range(CELLS) for column in range(CELLS - 1)]
        rng.shuffle(starts)
        for row, column in starts:
            pair = {(row, column), (row, column + 1)}
            if len(signs) == len(colours) or not pair <= {*cells}:
                continue
            cells = [cell for cell in cells if cell not in pair]
            length = rng.randint(2, MAX_DIGITS)
            start = column * CELL_PATCHES + rng.randint(0, 2 * CELL_PATCHES - length)
            number = tuple(rng.randrange(10) for _ in range(length))
            top = row * CELL_PATCHES + rng.randrange(CELL_PATCHES)
            signs.append(Sign(colours[len(signs)], number, top, start))
        # Shapes are placed in the remaining cells.
        ranges = {"signs": (4, 7), "scattered": (5, 9), "crowded": (9, MAX_SHAPES)}
        count = min(len(cells), rng.randint(*ranges.get(style, (5, 8))))
        colour_count = rng.randint(3, 4)
        form_count = len(SHAPES) if count > 3 * colour_count - 1 else rng.randint(3, 4)
        colours = rng.sample(range(len(COLOURS)), colour_count)
        shapes = rng.sample(range(len(SHAPES)), form_count)
        names = [(colour, shape) for colour in colours for shape in shapes]
        radii = (9.0, 11.0) if style == "crowded" else (10.5, 13.5)
        return cls.place(rng, names, cells, min(count, len(names)), radii, tuple(signs))

    @classmethod
    def place(
        cls,
        rng: random.Random,
        names: Sequence[tuple[int, int]],
        cells: Sequence[tuple[int, int]],
        count: int,
        radii: tuple[float, float],
        signs: tuple[Sign, ...] = (),
    ) -> Scene:
        """Place `count` of the names (colour, form) in the first of the cells (row, column).

        `radii` are the smallest and the largest radius, in pixels.
        """
        digits: list[int] = []
        while len(digits) < count:
            digits += rng.sample(range(10), 10)
        things = tuple(
            Thing(
                colour,
                shape,
                digit,
                row,
                column,
                rng.uniform(*radii),
                (rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
            )
            for (colour, shape), digit, (row, column) in zip(
                rng.sample(names, count), digits, cells, strict=False
            )
        )
        return cls(things, signs)


def render_scenes(
    scenes: Sequence[Scene],
    cells: int,
    seed: int,
    *,
    clean: bool = False,
    clip: bool = False,
    photographs: bool = False,
) -> tuple[Tensor, list[Scene]]:
    """Images (B, 3, H, W) uint8 of scenes on `cells` x `cells` cells, and the scenes with patches.

    The same scenes and seed give the same pixels; `clean` only leaves out their grain. The images
    of a `clip` have one background, and one shade for each name.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = cells * CELL_PATCHES
    size = 1 if clip else len(scenes)
    # The background has a grey tint, blotches of patch size, and checkerboards.
    tone = 80 + 110 * torch.rand(size, 1, 1, 1, generator=generator)
    tint = 12 * torch.randn(size, 3, 1, 1, generator=generator)
    blotches = 14 * torch.randn(size, 3, grid, grid, generator=generator)
    blotches = F.interpolate(
        blotches, size=cells * CELL, mode="bilinear", align_corners=False
    )
    fine = (torch.arange(cells * CELL) // 5) % 2
    checker = (fine[:, None] ^ fine[None, :]).float() * 2 - 1
    checkered = (torch.rand(size, 1, grid, grid, generator=generator) < 0.08).float()
    checkered = checkered.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    pixels = tone + tint + blotches + checkered * checker * 35
    if clip:
        pixels = pixels.repeat(len(scenes), 1, 1, 1)
    # Photographs have another generator, so that shades of shapes do not depend on them.
    if photographs:
        cuttings = cut_photographs(
            random.Random(seed), len(scenes), cells * CELL, cells * CELL
        )
        pixels = 128 + cuttings

    things = [
        (index, thing) for index, scene in enumerate(scenes) for thing in scene.things
    ]
    shape_patches = iter(_paint_things(pixels, things, cells, generator, clip))
    marks = [
        (index, mark) for index, scene in enumerate(scenes) for mark in scene.marks
    ]
    if marks:
        _paint_things(pixels, marks, cells, generator)
    characters = [
        (index, sign.row, sign.column + slot, sign.colour, digit)
        for index, scene in enumerate(scenes)
        for sign in scene.signs
        for slot, digit in enumerate(sign.number)
    ]
    if characters:
        image, row, column, colour, digit = torch.tensor(characters).T
        _paint_characters(pixels, (image, row, column), colour, digit, generator)
    rendered = []
    for scene in scenes:
        patches: dict[Thing | Sign, tuple[int, ...]] = {
            thing: next(shape_patches) for thing in scene.things
        }
        for sign in scene.signs:
            corner = sign.row * grid + sign.column
            patches[sign] = tuple(range(corner, corner + len(sign.number)))
        rendered.append(replace(scene, patches=patches))
    return add_grain(pixels, generator, clean=clean), rendered


def render_characters(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, H, W) with a digit in every patch; digits and colours, (B, N) each."""
    generator = torch.Generator().manual_seed(seed)
    digit = torch.randint(10, (size, GRID, GRID), generator=generator)
    colour = torch.randint(len(COLOURS), (size, GRID, GRID), generator=generator)
    image, row, column = torch.ones_like(digit, dtype=torch.bool).nonzero(as_tuple=True)
    pixels = torch.zeros(size, 3, CELLS * CELL, CELLS * CELL)
    _paint_characters(
        pixels, (image, row, column), colour.flatten(), digit.flatten(), generator
    )
    return add_grain(pixels, generator), digit.flatten(1), colour.flatten(1)


def normalize_pixels(images: Tensor) -> Tensor:
    """Normalised pixels (B, 3, H, W) of uint8 images, as the image processor computes them."""
    mean = torch.tensor(_PIXEL_MEAN)[:, None, None]
    std = torch.tensor(_PIXEL_STD)[:, None, None]
    return (images.float() / 255 - mean) / std


@cache
def _photographs() -> Tensor:
    """Twelve photographs (12, 3, S, S), S = 504: 0.7 times their difference from their mean.

    Trained weights and splits depend on the pictures that `draw_picture` draws.
    """
    pictures = [np.asarray(draw_picture(seed, 504, 504)) for seed in range(12)]
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
    return 0.7 * (pixels - pixels.mean((2, 3), keepdim=True))


def cut_photographs(rng: random.Random, count: int, height: int, width: int) -> Tensor:
    """Random crops (B, 3, H, W) of photographs, turned, mirrored, and with swapped colours."""
    cuttings = list[Tensor]()
    for _ in range(count):
        photograph = _photographs()[rng.randrange(len(_photographs()))]
        photograph = photograph.rot90(rng.randrange(4), (1, 2))
        if rng.random() < 0.5:
            photograph = photograph.flip(2)
        top, start = (
            rng.randint(0, photograph.shape[1] - side) for side in (height, width)
        )
        swapped = photograph[rng.sample(range(3), 3)]
        cuttings.append(swapped[:, top : top + height, start : start + width])
    return torch.stack(cuttings)


def add_grain(
    pixels: Tensor, generator: torch.Generator, *, clean: bool = False
) -> Tensor:
    """Convert float pixels (B, 3, H, W) to uint8 with a little grain, or without if `clean`."""
    size, _, height, width = pixels.shape
    grain = (0 if clean else 5) * torch.randn(
        size, 1, height, width, generator=generator
    )
    return (pixels + grain).round().clamp(0, 255).to(torch.uint8)


def _paint_things(
    pixels: Tensor,
    things: Sequence[tuple[int, Thing]],
    cells: int,
    generator: torch.Generator,
    clip: bool = False,
) -> list[tuple[int, ...]]:
    """Paint shapes into images (B, 3, H, W); returns the patches of each, middle patch first."""
    image, colour, shape, digit, row, column = torch.tensor(
        [(index, t.colour, t.shape, t.digit, t.row, t.column) for index, t in things]
    ).T
    radius = torch.tensor([thing.radius for _, thing in things])[:, None, None]
    x, y = _offsets(CELL, torch.tensor([thing.shift for _, thing in things]))
    across = x / radius
    down = y / radius
    ax = across.abs()
    ay = down.abs()
    middle = (across * across + down * down).sqrt()
    turn = torch.atan2(down, across)
    shadow = ((across - 0.7).square() + down.square()).sqrt()
    # Signed distances in radii, negative inside, of the forms of shapes, then of the forms of
    # marks.
    distances = torch.stack(
        (
            middle - 1.0,
            torch.maximum(ax, ay) - 0.9,
            torch.maximum(down - 0.9, (ax - (down + 1.2) * 0.571) * 0.87),
            (ax + ay - 1.25) * 0.71,
            torch.minimum(
                torch.maximum(ax - 0.5, ay - 1.12), torch.maximum(ay - 0.5, ax - 1.12)
            ),
            middle - 0.85 - 0.3 * (5 * turn).cos(),
            (middle - 0.8).abs() - 0.28,
            torch.maximum(ax - 1.2, ay - 0.55),
            torch.maximum(middle - 1.1, 0.7 - shadow),
        )
    )[shape, torch.arange(len(shape))]
    inside = torch.sigmoid(-distances * radius * 2.5)
    paint = _mix(
        colour, digit, x, y, generator, colour * len(SHAPES) + shape if clip else None
    )
    view = pixels.view(len(pixels), 3, cells, CELL, cells, CELL).permute(
        0, 2, 4, 1, 3, 5
    )
    opacity = torch.tensor([thing.opacity for _, thing in things])
    alpha = inside[:, None] * opacity[:, None, None, None]
    view[image, row, column] = view[image, row, column] * (1 - alpha) + paint * alpha

    coverage = inside.view(len(things), CELL_PATCHES, PATCH, CELL_PATCHES, PATCH).mean(
        (2, 4)
    )
    # The middle patch comes first, because it shows the digit.
    count = CELL_PATCHES**2
    order = torch.tensor(
        [count // 2, *range(count // 2), *range(count // 2 + 1, count)]
    )
    covered = (coverage.flatten(1) >= _COVERAGE)[:, order]
    corner = (row * cells * CELL_PATCHES + column) * CELL_PATCHES
    grid = cells * CELL_PATCHES
    patches = corner[:, None] + order // CELL_PATCHES * grid + order % CELL_PATCHES
    return [
        tuple(patch[covers].tolist())
        for patch, covers in zip(patches, covered, strict=True)
    ]


def _paint_characters(
    pixels: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    colour: Tensor,
    digit: Tensor,
    generator: torch.Generator,
) -> None:
    """Paint coloured plates with digits over patches `where` (image, row, column), each (M,)."""
    shift = (torch.rand(len(digit), 2, generator=generator) * 2 - 1) * 1.5
    grid = pixels.shape[2] // PATCH
    view = pixels.view(len(pixels), 3, grid, PATCH, grid, PATCH).permute(
        0, 2, 4, 1, 3, 5
    )
    view[where] = _mix(colour, digit, *_offsets(PATCH, shift), generator)


def _offsets(side: int, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Pixel offsets x, y (M, side, side) from centres of squares moved by `shift` (M, 2)."""
    axis = torch.arange(side) + 0.5 - side / 2
    x = axis[None, None, :] - shift[:, 0, None, None]
    y = axis[None, :, None] - shift[:, 1, None, None]
    x, y = torch.broadcast_tensors(x, y)
    return x, y


def _mix(
    colour: Tensor,
    digit: Tensor,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    name: Tensor | None = None,
) -> Tensor:
    """Pixels (M, 3, h, w) of colours with a little noise; a digit is centred where x and y are 0.

    Rows with the same `name` (M,) get the same noise.
    """
    grid = torch.stack((x / _GLYPH_X, y / _GLYPH_Y), dim=-1)
    ink = F.grid_sample(_CHARACTERS[digit, None], grid, align_corners=False)
    rgb = torch.tensor([paint["rgb"] for paint in _PAINTS]).float()[colour]
    count = len(colour) if name is None else len(COLOURS) * len(SHAPES)
    noise = torch.randn(count, 3, generator=generator)
    rgb = rgb + 10 * (noise if name is None else noise[name])
    dark = torch.tensor([paint["ink"] for paint in _PAINTS]).float()[colour][
        :, None, None, None
    ]
    return rgb[:, :, None, None] * (1 - ink) + dark * ink
