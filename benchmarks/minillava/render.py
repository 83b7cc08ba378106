"""Renderer: images of many scenes at once, and the patches that each shape and sign covers.

Vectorised in torch, because every training step draws new scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.minillava.layout import (
    CELL,
    CELL_PATCHES,
    COLOURS,
    PATCH,
    Canvas,
    Layout,
    Sign,
    Thing,
)

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's normalisation of red, green and blue."""

_RGB = (
    (215, 40, 40), (40, 150, 60), (45, 75, 215), (235, 215, 45),
    (135, 55, 170), (240, 135, 25), (60, 205, 215), (245, 150, 195),
)  # fmt: skip
# Dark digits on light colours, light digits on dark ones.
_INK = (255, 255, 255, 10, 255, 10, 10, 10)
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
# Half the width and half the height of a digit, in pixels.
_GLYPH_X, _GLYPH_Y = 4.2, 5.8
# A patch belongs to a shape if the shape covers at least this fraction of it.
_COVERAGE = 0.15


@dataclass(frozen=True)
class Scene:
    """A layout with the raster patches of its shapes and signs, in the layout's order.

    The first patch of a shape is the middle of its cell; a sign's patches are in reading order.
    """

    layout: Layout
    thing_patches: tuple[tuple[int, ...], ...]
    sign_patches: tuple[tuple[int, ...], ...]

    def patches(self, part: Thing | Sign) -> tuple[int, ...]:
        """The raster patches of a shape or sign of this scene."""
        if isinstance(part, Thing):
            return self.thing_patches[self.layout.things.index(part)]
        return self.sign_patches[self.layout.signs.index(part)]


@dataclass(frozen=True)
class Batch:
    """Images (B, 3, H, W) uint8 and the scenes they show."""

    images: Tensor
    scenes: tuple[Scene, ...]


def _distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distances in radii, negative inside; shape (M,), x and y (M, 42, 42)."""
    ax, ay = x.abs(), y.abs()
    distances = torch.stack(
        (
            (x * x + y * y).sqrt() - 1.0,
            torch.maximum(ax, ay) - 0.9,
            torch.maximum(y - 0.9, (ax - (y + 1.2) * 0.571) * 0.87),
            (ax + ay - 1.25) * 0.71,
            torch.minimum(torch.maximum(ax - 0.5, ay - 1.12), torch.maximum(ay - 0.5, ax - 1.12)),
        )
    )
    return distances[shape, torch.arange(len(shape))]


def _ink(digits: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Coverage (M, 1, h, w) of digits centred on the origin of the pixel offsets x and y."""
    rows = [[[float(bit) for bit in row] for row in glyph.split()] for glyph in GLYPHS]
    glyphs = torch.tensor(rows)
    grid = torch.stack((x / _GLYPH_X, y / _GLYPH_Y), dim=-1)
    return F.grid_sample(glyphs[digits][:, None], grid, align_corners=False)


def _paint(colour: Tensor, ink: Tensor, generator: torch.Generator) -> Tensor:
    """Pixels (M, 3, h, w) of the colours with a little noise, and the digits in their ink."""
    rgb = torch.tensor(_RGB).float()[colour]
    rgb = rgb + 10 * torch.randn(len(colour), 3, generator=generator)
    dark = torch.tensor(_INK).float()[colour][:, None, None, None]
    return rgb[:, :, None, None] * (1 - ink) + dark * ink


def _background(size: int, canvas: Canvas, generator: torch.Generator) -> Tensor:
    """Float pixels (B, 3, H, W): tinted grey, blotches of patch size, checkerboard clutter."""
    tone = 80 + 110 * torch.rand(size, 1, 1, 1, generator=generator)
    tint = 12 * torch.randn(size, 3, 1, 1, generator=generator)
    blotches = 14 * torch.randn(size, 3, canvas.grid, canvas.grid, generator=generator)
    blotches = F.interpolate(blotches, size=canvas.image, mode="bilinear", align_corners=False)
    fine = (torch.arange(canvas.image) // 5) % 2
    checker = (fine[:, None] ^ fine[None, :]).float() * 2 - 1
    clutter = (torch.rand(size, 1, canvas.grid, canvas.grid, generator=generator) < 0.08).float()
    clutter = clutter.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return tone + tint + blotches + clutter * checker * 35


def _draw_things(
    pixels: Tensor, layouts: Sequence[Layout], canvas: Canvas, generator: torch.Generator
) -> list[tuple[int, ...]]:
    """Paint all shapes into (B, 3, H, W) and return the patches of each, middle patch first."""
    flat = [(index, thing) for index, layout in enumerate(layouts) for thing in layout.things]
    image_of = torch.tensor([index for index, _ in flat])
    colour = torch.tensor([thing.colour for _, thing in flat])
    shape = torch.tensor([thing.shape for _, thing in flat])
    digit = torch.tensor([thing.digit for _, thing in flat])
    radius = torch.tensor([thing.radius for _, thing in flat])[:, None, None]
    shift = torch.tensor([thing.shift for _, thing in flat])
    row = torch.tensor([thing.row for _, thing in flat])
    column = torch.tensor([thing.column for _, thing in flat])

    axis = torch.arange(CELL) + 0.5 - CELL / 2
    x, y = torch.broadcast_tensors(
        axis[None, None, :] - shift[:, 0, None, None], axis[None, :, None] - shift[:, 1, None, None]
    )
    inside = torch.sigmoid(-_distance(shape, x / radius, y / radius) * radius * 2.5)
    paint = _paint(colour, _ink(digit, x, y), generator)
    cells = canvas.cells
    view = pixels.view(len(layouts), 3, cells, CELL, cells, CELL).permute(0, 2, 4, 1, 3, 5)
    alpha = inside[:, None]
    view[image_of, row, column] = view[image_of, row, column] * (1 - alpha) + paint * alpha

    coverage = inside.view(len(flat), CELL_PATCHES, PATCH, CELL_PATCHES, PATCH).mean((2, 4))
    covered = (coverage >= _COVERAGE).flatten(1).tolist()
    # The middle patch shows the digit, so it comes first.
    order = sorted(range(CELL_PATCHES**2), key=lambda place: place != CELL_PATCHES**2 // 2)
    patches: list[tuple[int, ...]] = []
    for covers, (_, thing) in zip(covered, flat, strict=True):
        corner = thing.row * CELL_PATCHES * canvas.grid + thing.column * CELL_PATCHES
        patches.append(
            tuple(
                corner + place // CELL_PATCHES * canvas.grid + place % CELL_PATCHES
                for place in order
                if covers[place]
            )
        )
    return patches


def _draw_signs(
    pixels: Tensor, layouts: Sequence[Layout], canvas: Canvas, generator: torch.Generator
) -> None:
    """Paint all signs into (B, 3, H, W), one patch per character."""
    flat = [
        (index, sign.row, sign.column + slot, sign.colour, digit)
        for index, layout in enumerate(layouts)
        for sign in layout.signs
        for slot, digit in enumerate(sign.number)
    ]
    if flat:
        image, row, column, colour, digit = torch.tensor(flat).T
        _draw_characters(pixels, canvas, (image, row, column), colour, digit, generator)


def _draw_characters(
    pixels: Tensor,
    canvas: Canvas,
    where: tuple[Tensor, Tensor, Tensor],
    colour: Tensor,
    digit: Tensor,
    generator: torch.Generator,
) -> None:
    """Fill the patches `where` (image, row, column), each (M,), with digits on coloured plates."""
    shift = (torch.rand(len(digit), 2, generator=generator) * 2 - 1) * 1.5
    axis = torch.arange(PATCH) + 0.5 - PATCH / 2
    x, y = torch.broadcast_tensors(
        axis[None, None, :] - shift[:, 0, None, None], axis[None, :, None] - shift[:, 1, None, None]
    )
    grid = canvas.grid
    view = pixels.view(len(pixels), 3, grid, PATCH, grid, PATCH).permute(0, 2, 4, 1, 3, 5)
    view[where] = _paint(colour, _ink(digit, x, y), generator)


def _finish(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Convert float pixels to uint8 with a little grain."""
    size, _, height, width = pixels.shape
    grain = 5 * torch.randn(size, 1, height, width, generator=generator)
    return (pixels + grain).round().clamp(0, 255).to(torch.uint8)


def render(layouts: Sequence[Layout], canvas: Canvas, seed: int) -> Batch:
    """Render layouts; the same layouts and seed give the same pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = _background(len(layouts), canvas, generator)
    patches = iter(_draw_things(pixels, layouts, canvas, generator))
    _draw_signs(pixels, layouts, canvas, generator)
    scenes = tuple(
        Scene(
            layout,
            tuple(next(patches) for _ in layout.things),
            tuple(
                tuple(range(first := sign.row * canvas.grid + sign.column, first + len(sign.text)))
                for sign in layout.signs
            ),
        )
        for layout in layouts
    )
    return Batch(_finish(pixels, generator), scenes)


def render_characters(seed: int, size: int, canvas: Canvas) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, H, W) with a digit in every patch; its value and its colour, (B, N) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, canvas.grid, canvas.grid)
    digit = torch.randint(10, shape, generator=generator)
    colour = torch.randint(len(COLOURS), shape, generator=generator)
    where = torch.ones(shape, dtype=torch.bool).nonzero(as_tuple=True)
    pixels = torch.zeros(size, 3, canvas.image, canvas.image)
    _draw_characters(
        pixels, canvas, (where[0], where[1], where[2]), colour.flatten(), digit.flatten(), generator
    )
    return _finish(pixels, generator), digit.flatten(1), colour.flatten(1)


def normalize_pixels(images: Tensor) -> Tensor:
    """Normalised pixels (B, 3, H, W) bf16 of uint8 images, as the image processor computes them."""
    mean = torch.tensor(PIXEL_MEAN)[:, None, None]
    std = torch.tensor(PIXEL_STD)[:, None, None]
    return ((images.float() / 255 - mean) / std).to(torch.bfloat16)
