"""Renderer of scenes and pages of one size, and of what the processor makes of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.minillava.layout import CELL, CELL_PATCHES, PATCH, Canvas, Layout
from benchmarks.minillava.render import GLYPHS, Scene, normalize_pixels
from benchmarks.minillava.render import render as render_layouts
from benchmarks.miniqwen.pages import WORDS, Page
from benchmarks.miniqwen.sizes import MERGE, TOKEN, Size

# Capitals from A to Z, 5 x 7 dots each.
_LETTERS = (
    "01110 10001 10001 11111 10001 10001 10001", "11110 10001 10001 11110 10001 10001 11110",
    "01110 10001 10000 10000 10000 10001 01110", "11100 10010 10001 10001 10001 10010 11100",
    "11111 10000 10000 11110 10000 10000 11111", "11111 10000 10000 11110 10000 10000 10000",
    "01110 10001 10000 10111 10001 10001 01111", "10001 10001 10001 11111 10001 10001 10001",
    "01110 00100 00100 00100 00100 00100 01110", "00111 00010 00010 00010 00010 10010 01100",
    "10001 10010 10100 11000 10100 10010 10001", "10000 10000 10000 10000 10000 10000 11111",
    "10001 11011 10101 10101 10001 10001 10001", "10001 10001 11001 10101 10011 10001 10001",
    "01110 10001 10001 10001 10001 10001 01110", "11110 10001 10001 11110 10000 10000 10000",
    "01110 10001 10001 10001 10101 10010 01101", "11110 10001 10001 11110 10100 10010 10001",
    "01111 10000 10000 01110 00001 00001 11110", "11111 00100 00100 00100 00100 00100 00100",
    "10001 10001 10001 10001 10001 10001 01110", "10001 10001 10001 10001 10001 01010 00100",
    "10001 10001 10001 10101 10101 10101 01010", "10001 10001 01010 00100 01010 10001 10001",
    "10001 10001 10001 01010 00100 00100 00100", "11111 00001 00010 00100 01000 10000 11111",
)  # fmt: skip


@functools.cache
def _blocks(glyphs: tuple[str, ...], width: int, half_x: float, half_y: float) -> Tensor:
    """Coverage (G, PATCH, width) of glyphs of 5 x 7 dots, centred in blocks of one line."""
    dots = torch.tensor(
        [[[float(bit) for bit in row] for row in glyph.split()] for glyph in glyphs]
    )
    x = (torch.arange(width) + 0.5 - width / 2) / half_x
    y = (torch.arange(PATCH) + 0.5 - PATCH / 2) / half_y
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)
    grid = grid.expand(len(glyphs), -1, -1, -1)
    return F.grid_sample(dots[:, None], grid, align_corners=False)[:, 0]


@functools.cache
def _word_blocks() -> Tensor:
    """Coverage (W, PATCH, TOKEN) of all words, in capitals."""
    letters = _blocks(_LETTERS, 6, 2.6, 5.4)
    places = [[ord(letter) - ord("a") for letter in word] for word in WORDS]
    return F.pad(letters[torch.tensor(places)].transpose(1, 2).flatten(2), (2, 2))


@functools.cache
def _number_blocks() -> Tensor:
    """Coverage (100, PATCH, TOKEN) of all numbers of two digits."""
    digits = _blocks(GLYPHS, 11, 4.2, 5.8)
    tens, units = torch.arange(100) // 10, torch.arange(100) % 10
    return F.pad(torch.cat((digits[tens], digits[units]), 2), (3, 3))


@dataclass(frozen=True)
class PlacedText:
    """Where the line of a word or number was painted: its centre in pixels."""

    x: float
    y: float


def render_pages(pages: Sequence[Page], seed: int) -> tuple[Tensor, list[list[PlacedText]]]:
    """Images (B, 3, H, W) uint8, and the place of each word and then each number of every page.

    All pages have one size. A line fills the upper or the lower half of its token, a little off.
    """
    size = pages[0].size
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    flat: list[tuple[int, int, int, int]] = []
    places: list[list[PlacedText]] = []
    offset = len(WORDS)
    for index, page in enumerate(pages):
        row_shift = [rng.choice((0, PATCH)) for _ in range(size.rows)]
        of_page: list[PlacedText] = []
        items = [(one.word, one.row, one.column) for one in page.words]
        items += [(offset + one.value, one.row, one.column) for one in page.numbers]
        for block, row, column in items:
            top = row * TOKEN + row_shift[row] + rng.randint(-1, 1)
            left = column * TOKEN + rng.randint(-1, 1)
            flat.append((index, block, top + 1, left + 1))
            of_page.append(PlacedText(left + TOKEN / 2, top + PATCH / 2))
        places.append(of_page)
    # One pixel of margin holds what is shifted beyond the edge.
    height, width = size.height + 2, size.width + 2
    ink = torch.zeros(len(pages) * height * width)
    image, block, top, left = torch.tensor(flat).T
    blocks = torch.cat((_word_blocks(), _number_blocks()))[block]
    at = (image * height + top) * width + left
    pixel = torch.arange(PATCH)[:, None] * width + torch.arange(TOKEN)
    at = at[:, None, None] + pixel
    ink.index_put_((at.flatten(),), blocks.flatten(), accumulate=True)
    ink = ink.view(len(pages), 1, height, width)[:, :, 1:-1, 1:-1].clamp(0, 1)

    inverse = torch.rand(len(pages), 1, 1, 1, generator=generator) < 0.2
    light = 215 + 35 * torch.rand(len(pages), 3, 1, 1, generator=generator)
    dark = 70 * torch.rand(len(pages), 3, 1, 1, generator=generator)
    paper, text = torch.where(inverse, dark, light), torch.where(inverse, light, dark)
    pixels = paper * (1 - ink) + text * ink
    grain = 5 * torch.randn(len(pages), 1, size.height, size.width, generator=generator)
    return (pixels + grain).round().clamp(0, 255).to(torch.uint8), places


def scene_cells(size: Size) -> tuple[int, int]:
    """Rows and columns of a scene's cells of three patches."""
    return size.rows * MERGE // CELL_PATCHES, size.columns * MERGE // CELL_PATCHES


def render_scenes(layouts: Sequence[Layout], size: Size, seed: int) -> tuple[Tensor, list[Scene]]:
    """Images (B, 3, H, W) uint8 and scenes whose patches are visual tokens in raster order."""
    canvas = Canvas(max(scene_cells(size)))
    drawn = render_layouts(layouts, canvas, seed)
    scenes = [
        Scene(
            scene.layout,
            tuple(_tokens(patches, canvas.grid, size) for patches in scene.thing_patches),
            (),
        )
        for scene in drawn.scenes
    ]
    return drawn.images[:, :, : size.height, : size.width], scenes


def _tokens(patches: Sequence[int], grid: int, size: Size) -> tuple[int, ...]:
    """Raster tokens of raster patches, without repetitions, in the same order."""
    tokens = (patch // grid // MERGE * size.columns + patch % grid // MERGE for patch in patches)
    return tuple(dict.fromkeys(tokens))


def thing_centre(row: int, column: int, shift: tuple[float, float]) -> tuple[float, float]:
    """Centre (x, y) in pixels of a shape in a cell."""
    return (column + 0.5) * CELL + shift[0], (row + 0.5) * CELL + shift[1]


def resize_images(images: Tensor, size: Size) -> Tensor:
    """Resize (B, 3, H, W) uint8 images as the image processor does."""
    if tuple(images.shape[2:]) == (size.height, size.width):
        return images
    resized = F.interpolate(
        images.float(), (size.height, size.width), mode="bicubic", antialias=True
    )
    return resized.round().clamp(0, 255).to(torch.uint8)


def split_patches(images: Tensor) -> Tensor:
    """Normalised patches (B, N, MERGE², 3 · PATCH²) bf16, in the order of their tokens."""
    values = normalize_pixels(images)
    rows, columns = values.shape[2] // TOKEN, values.shape[3] // TOKEN
    view = values.view(len(values), 3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    return view.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(
        len(values), rows * columns, MERGE * MERGE, 3 * PATCH * PATCH
    )
