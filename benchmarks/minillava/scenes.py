"""Synthetic scenes: coloured shapes, each carrying a digit, on a cluttered background.

Knows nothing about questions, tokens or models; a scene is a record, an image and dense labels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

IMAGE = 168
PATCH = 14
GRID = IMAGE // PATCH
PATCHES = GRID * GRID
CELLS = 4
CELL = IMAGE // CELLS
CELL_PATCHES = CELL // PATCH

COLOURS: tuple[str, ...] = (
    "red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink",
)  # fmt: skip
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "cross")

_RGB = (
    (215, 40, 40), (40, 150, 60), (45, 75, 215), (235, 215, 45),
    (135, 55, 170), (240, 135, 25), (60, 205, 215), (245, 150, 195),
)  # fmt: skip
# Dark digits on light colours, light digits on dark ones.
_INK = (255, 255, 255, 10, 255, 10, 10, 10)

# torch's CPU generator keeps the low 32 bits of a seed, so both ranges stay below 2**32.
TRAINING_SEEDS = range(0, 2**31)
EVALUATION_SEEDS = range(2**31, 2**31 + 2**20)

# A patch belongs to an object once this share of its pixels does.
_COVERAGE = 0.15

_GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """One object; indices into `COLOURS` and `SHAPES`, its cell and its raster patches."""

    colour: int
    shape: int
    digit: int
    cell: int
    patches: tuple[int, ...]

    @property
    def name(self) -> str:
        """Colour and shape in words, unique within a scene."""
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(frozen=True)
class Scene:
    """The objects of one image."""

    things: tuple[Thing, ...]


@dataclass(frozen=True)
class SceneBatch:
    """`images` (B, 3, 168, 168) uint8, `owner` (B, 144) index of the patch's thing or -1."""

    images: Tensor
    owner: Tensor
    scenes: tuple[Scene, ...]


def training_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """The scene seed of one training batch; never one of `EVALUATION_SEEDS`."""
    drawn = (((seed % 256) * 2 + stage) * 2**17 + step) * 2 + rank
    assert drawn in TRAINING_SEEDS and drawn not in EVALUATION_SEEDS
    return drawn


@dataclass(frozen=True)
class _Layout:
    colour: int
    shape: int
    digit: int
    cell: int


def _layout(rng: random.Random) -> list[_Layout]:
    # Few colours and shapes in a scene, so that most distractors share one of the two.
    colours = rng.sample(range(len(COLOURS)), 3)
    shapes = rng.sample(range(len(SHAPES)), 3)
    count = rng.randint(4, 8)
    pairs = rng.sample([(c, s) for c in colours for s in shapes], count)
    digits = rng.sample(range(10), count)
    cells = rng.sample(range(CELLS * CELLS), count)
    return [_Layout(c, s, d, cell) for (c, s), d, cell in zip(pairs, digits, cells, strict=True)]


def _glyph_bank() -> Tensor:
    rows = [[[float(bit) for bit in row] for row in glyph.split()] for glyph in _GLYPHS]
    return torch.tensor(rows)


def _distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distances in radii, negative inside; shape (M,), x and y (M, 42, 42)."""
    ax, ay = x.abs(), y.abs()
    every = torch.stack(
        (
            (x * x + y * y).sqrt() - 1.0,
            torch.maximum(ax, ay) - 0.9,
            torch.maximum(y - 0.9, (ax - (y + 1.2) * 0.571) * 0.87),
            (ax + ay - 1.25) * 0.71,
            torch.minimum(torch.maximum(ax - 0.5, ay - 1.12), torch.maximum(ay - 0.5, ax - 1.12)),
        )
    )
    return every[shape, torch.arange(len(shape))]


def _background(size: int, generator: torch.Generator) -> Tensor:
    """(B, 3, 168, 168) floats: a tinted grey, blotches at patch scale, checker clutter."""
    tone = 80 + 110 * torch.rand(size, 1, 1, 1, generator=generator)
    tint = 12 * torch.randn(size, 3, 1, 1, generator=generator)
    blotches = 14 * torch.randn(size, 3, GRID, GRID, generator=generator)
    blotches = F.interpolate(blotches, size=IMAGE, mode="bilinear", align_corners=False)
    fine = (torch.arange(IMAGE) // 5) % 2
    checker = (fine[:, None] ^ fine[None, :]).float() * 2 - 1
    where = (torch.rand(size, 1, GRID, GRID, generator=generator) < 0.08).float()
    where = where.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return tone + tint + blotches + where * checker * 35


def draw(seed: int, size: int) -> SceneBatch:
    """Draw `size` scenes from one seed; the same seed and size give the same pixels."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layouts = [_layout(rng) for _ in range(size)]
    flat = [(index, item) for index, items in enumerate(layouts) for item in items]
    image_of = torch.tensor([index for index, _ in flat])
    colour = torch.tensor([item.colour for _, item in flat])
    shape = torch.tensor([item.shape for _, item in flat])
    digit = torch.tensor([item.digit for _, item in flat])
    cell = torch.tensor([item.cell for _, item in flat])
    many = len(flat)

    # Centres stay near a patch centre: wide jitter makes digits too hard for so small a tower.
    shift = (torch.rand(many, 2, generator=generator) * 2 - 1) * 3.5
    radius = 11.5 + 2.5 * torch.rand(many, 1, 1, generator=generator)
    axis = torch.arange(CELL) + 0.5 - CELL / 2
    x = axis[None, None, :] - shift[:, 0, None, None]
    y = axis[None, :, None] - shift[:, 1, None, None]
    x, y = torch.broadcast_tensors(x, y)
    inside = torch.sigmoid(-_distance(shape, x / radius, y / radius) * radius * 2.5)

    glyph_grid = torch.stack((x / 4.4, y / 6.2), dim=-1)
    ink = F.grid_sample(_glyph_bank()[digit][:, None], glyph_grid, align_corners=False)
    rgb = torch.tensor(_RGB).float()[colour] + 10 * torch.randn(many, 3, generator=generator)
    paint = rgb[:, :, None, None] * (1 - ink)
    paint = paint + torch.tensor(_INK).float()[colour][:, None, None, None] * ink

    canvas = _background(size, generator)
    view = canvas.view(size, 3, CELLS, CELL, CELLS, CELL).permute(0, 2, 4, 1, 3, 5)
    row, column = cell // CELLS, cell % CELLS
    alpha = inside[:, None]
    view[image_of, row, column] = view[image_of, row, column] * (1 - alpha) + paint * alpha
    canvas = canvas + 5 * torch.randn(size, 1, IMAGE, IMAGE, generator=generator)
    images = canvas.round().clamp(0, 255).to(torch.uint8)

    tiles = inside.view(many, CELL_PATCHES, PATCH, CELL_PATCHES, PATCH).mean((2, 4))
    held = (tiles >= _COVERAGE).tolist()
    owner = torch.full((size, PATCHES), -1)
    scenes: list[Scene] = []
    position = 0
    for index, items in enumerate(layouts):
        things: list[Thing] = []
        for item in items:
            patches = _patches(held[position], item.cell)
            owner[index, list(patches)] = len(things)
            things.append(Thing(item.colour, item.shape, item.digit, item.cell, patches))
            position += 1
        scenes.append(Scene(tuple(things)))
    return SceneBatch(images, owner, tuple(scenes))


def _patches(held: Sequence[Sequence[bool]], cell: int) -> tuple[int, ...]:
    top, left = cell // CELLS * CELL_PATCHES, cell % CELLS * CELL_PATCHES
    return tuple(
        (top + r) * GRID + left + c
        for r in range(CELL_PATCHES)
        for c in range(CELL_PATCHES)
        if held[r][c]
    )
