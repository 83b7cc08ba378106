"""Pictures of any size in visual tokens: pages of words and numbers, and scenes on rectangles.

A page is a list of words with numbers, or a table, with one word or number in a visual token.
Images are resized and split into patches as mini-Qwen3-VL's processor does it.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.yardsticks.scenes import (
    CELL_PATCHES,
    COLOURS,
    GLYPHS,
    PATCH,
    RADII,
    SHAPES,
    WORDS,
    Scene,
    Thing,
    add_grain,
    cut_photographs,
    normalize_pixels,
    render_scenes,
)

MERGE = 2
TOKEN = PATCH * MERGE
"""Side in pixels of the square that one visual token covers."""

MAX_SHAPES = 14
"""Number of shapes in the fullest scene."""

NUMBERS = range(10, 100)
"""Numbers on pages."""

# Clutter: range of the share of free cells with a mark, and of free places with nonsense.
_MARKED = (0.2, 0.8)
_NONSENSE = (0.0, 0.6)
# Share of shapes and texts that are faint, and the range of their opacity.
_FAINT = 0.3
_FAINT_PAINT = (0.5, 0.85)
_FAINT_INK = (0.38, 0.85)
# Minimum number of words missing from a list or table, for the questions whose answer is "no".
_RESERVED = 4

PageStyle = Literal["list", "table", "full"]
PAGE_STYLES: tuple[PageStyle, ...] = ("list", "table")
"""Styles of pages about which questions are asked."""


@dataclass(frozen=True)
class Size:
    """The size of an image, in rows and columns of visual tokens of 28 x 28 pixels."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Visual tokens in total, N."""
        return self.rows * self.columns

    @property
    def copies(self) -> int:
        """Number of tokens that show the same place."""
        return 1

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.rows * TOKEN, self.columns * TOKEN

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of a scene's cells, each of three by three patches."""
        return self.rows * MERGE // CELL_PATCHES, self.columns * MERGE // CELL_PATCHES

    def token(self, row: int, column: int) -> int:
        """Index of the token that shows a place at full resolution."""
        return row * self.columns + column

    def tokens_at(self, row: int, column: int) -> Sequence[int]:
        """Indices of all tokens that show a place, the one at full resolution first."""
        return (self.token(row, column),)

    def rotary_positions(self, tokens: Tensor) -> Tensor:
        """M-RoPE positions (3, ...) of raster tokens (...) of an image: frame, row and column."""
        return torch.stack(
            (torch.zeros_like(tokens), tokens // self.columns, tokens % self.columns)
        )

    def limit(self, budget: int) -> Size:
        """Size to which the image processor resizes such an image for `budget` tokens at most."""
        # Imported here, because the load test draws pages in an image without transformers.
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        height, width = smart_resize(
            *self.pixels, TOKEN, TOKEN * TOKEN, budget * TOKEN * TOKEN
        )
        return Size(height // TOKEN, width // TOKEN)

    def draw_page(
        self, rng: random.Random, style: PageStyle, max_words: int = len(WORDS)
    ) -> Page:
        """Draw a page of this size, as :meth:`Page.draw` does."""
        return Page.draw(rng, style, self, max_words)

    def draw_scene(
        self, rng: random.Random, max_shapes: int = MAX_SHAPES, *, ring: bool = False
    ) -> Scene:
        """Draw a scene of few colours and forms, so that most distractors share one of them.

        Some shapes are faint. Some of the cells without a shape have a mark. In a ``ring`` shapes
        and marks are in the cells at the border only.
        """
        rows, columns = self.cells
        cells = [(row, column) for row in range(rows) for column in range(columns)]
        if ring:
            cells = [
                (row, column)
                for row, column in cells
                if row in (0, rows - 1) or column in (0, columns - 1)
            ]
        rng.shuffle(cells)
        colours = rng.sample(range(len(COLOURS)), rng.randint(3, 4))
        shapes = rng.sample(range(len(SHAPES)), rng.randint(3, 4))
        names = [(colour, shape) for colour in colours for shape in shapes]
        # One name stays unused, for the questions whose answer is "no".
        count = rng.randint(4, MAX_SHAPES)
        count = min(max_shapes, count, len(names) - 1, len(cells))
        scene = Scene.place(rng, names, cells, count, RADII)
        things = tuple(
            replace(thing, opacity=rng.uniform(*_FAINT_PAINT))
            if rng.random() < _FAINT
            else thing
            for thing in scene.things
        )
        free = cells[count:]
        marked = free[: round(rng.uniform(*_MARKED) * len(free))]
        return Scene(
            things, marks=tuple(Thing.draw_mark(rng, *cell) for cell in marked)
        )

    def render_scenes(
        self,
        scenes: Sequence[Scene],
        seed: int,
        *,
        clean: bool = False,
        clip: bool = False,
    ) -> tuple[Tensor, list[Scene]]:
        """Images (B, 3, H, W) uint8, and the scenes with raster indices of their visual tokens."""
        cells = max(self.cells)
        images, squares = render_scenes(
            scenes, cells, seed, clean=clean, clip=clip, photographs=not clip
        )
        grid = cells * CELL_PATCHES
        (height, width) = self.pixels

        def tokens(patches: Sequence[int]) -> tuple[int, ...]:
            places = [
                (patch // grid // MERGE, patch % grid // MERGE) for patch in patches
            ]
            return tuple(
                dict.fromkeys(
                    token for place in places for token in self.tokens_at(*place)
                )
            )

        rectangles = [
            replace(
                square,
                patches={
                    part: tokens(raster) for part, raster in square.patches.items()
                },
            )
            for square in squares
        ]
        return images[:, :, :height, :width], rectangles

    def split_patches(self, images: Tensor) -> Tensor:
        """Normalised patches (B, N, MERGE², 3 · PATCH²) of images, in the order of their tokens.

        The images (B, 3, H, W) uint8 are resized and split as the image processor does it.
        """
        if tuple(images.shape[2:]) != self.pixels:
            images = F.interpolate(
                images.float(), self.pixels, mode="bicubic", antialias=True
            )
            images = images.round().clamp(0, 255).to(torch.uint8)
        values = normalize_pixels(images)
        view = values.view(
            len(values), 3, self.rows, MERGE, PATCH, self.columns, MERGE, PATCH
        )
        patches = view.permute(0, 2, 5, 3, 6, 1, 4, 7)
        return patches.reshape(
            len(values), self.tokens, MERGE * MERGE, 3 * PATCH * PATCH
        )


# Sides are multiples of three tokens, so that scenes have whole cells of three patches.
SIZES = (
    Size(6, 6),
    Size(6, 9),
    Size(9, 6),
    Size(6, 12),
    Size(12, 6),
    Size(9, 9),
    Size(9, 12),
)
UNSEEN_SIZES = (Size(12, 9), Size(6, 15))
"""Sizes that occur in the test split only."""


@dataclass(frozen=True)
class Word:
    """A word, as an index into `WORDS`, and its place in tokens."""

    word: int
    row: int
    column: int

    @property
    def text(self) -> str:
        """The word in lower case, as in questions; pages show it in capitals."""
        return WORDS[self.word]


@dataclass(frozen=True)
class Number:
    """A two-digit number; `label` is the word on its left, `head` the one above its column."""

    value: int
    row: int
    column: int
    label: Word | None = None
    head: Word | None = None

    @property
    def name(self) -> str:
        """The text of the word on its left."""
        assert self.label is not None
        return self.label.text


@dataclass(frozen=True)
class Nonsense:
    """Four letters that are not a word."""

    text: str
    row: int
    column: int


_Text = TypeVar("_Text", Word, Number, Nonsense)


@dataclass(frozen=True)
class Page:
    """The content of one page; no question is about its nonsense."""

    style: PageStyle
    size: Size
    words: tuple[Word, ...]
    numbers: tuple[Number, ...]
    nonsense: tuple[Nonsense, ...]

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        style: PageStyle,
        size: Size,
        max_words: int = len(WORDS),
        names: Sequence[int] = range(len(WORDS)),
        values: Sequence[int] = NUMBERS,
    ) -> Page:
        """Draw a random page of at most `max_words` words, without a word or number twice.

        `max_words` counts as at least 4, the words of the smallest table. Words are drawn from
        `names`, of which at least 4 are missing from the page, and numbers from `values`.

        A `full` page follows none of these rules: it has a random word or number in nearly every
        place, without relations between them.
        """
        max_words = max(4, min(max_words, len(names) - _RESERVED))
        words = list[Word]()
        numbers = list[Number]()
        if style == "full":
            for row, column in product(range(size.rows), range(size.columns)):
                if rng.random() < 0.4:
                    words.append(Word(rng.randrange(len(WORDS)), row, column))
                elif rng.random() < 0.9:
                    numbers.append(Number(rng.choice(NUMBERS), row, column))
        elif style == "list":
            # A list has columns of words; most words have a number on their right.
            pitch = rng.choice((2, 3))
            margin = rng.randint(0, size.columns % pitch)
            starts = range(margin, size.columns - 1, pitch)
            places = [(row, column) for row in range(size.rows) for column in starts]
            count = min(max(3, round(rng.uniform(0.5, 0.95) * len(places))), max_words)
            listed = rng.sample(names, count)
            shown_values = rng.sample(values, count)
            for place, name, value in zip(
                sorted(rng.sample(places, count)), listed, shown_values, strict=True
            ):
                words.append(Word(name, *place))
                if len(numbers) < 2 or rng.random() < 0.9:
                    numbers.append(Number(value, place[0], place[1] + 1, words[-1]))
        else:
            # A table has a row of words above its columns and a column of words beside its rows.
            columns = rng.randint(2, min(6, size.columns - 1, max_words - 2))
            rows = rng.randint(2, min(size.rows - 1, max_words - columns))
            top = rng.randint(0, size.rows - 1 - rows)
            edge = rng.randint(0, size.columns - 1 - columns)
            listed = rng.sample(names, rows + columns)
            heads = [
                Word(name, top, edge + 1 + i) for i, name in enumerate(listed[:columns])
            ]
            labels = [
                Word(name, top + 1 + i, edge) for i, name in enumerate(listed[columns:])
            ]
            cells = [(label, head) for label in labels for head in heads]
            for (label, head), value in zip(
                cells, rng.sample(values, len(cells)), strict=True
            ):
                numbers.append(Number(value, label.row, head.column, label, head))
            words = heads + labels
        parts: list[Word | Number] = [*words, *numbers]
        taken = {(part.row, part.column) for part in parts}
        free = [
            cell
            for cell in product(range(size.rows), range(size.columns))
            if cell not in taken
        ]
        drawn = [
            Nonsense("".join(rng.choices(string.ascii_lowercase, k=4)), *place)
            for place in rng.sample(free, round(rng.uniform(*_NONSENSE) * len(free)))
        ]
        nonsense = tuple(part for part in drawn if part.text not in WORDS)
        return cls(style, size, tuple(words), tuple(numbers), nonsense)

    def move(self, rows: int, columns: int) -> Page:
        """The page with all texts moved down and to the right by these numbers of tokens."""

        def moved(part: _Text) -> _Text:
            return replace(part, row=part.row + rows, column=part.column + columns)

        words: dict[Word | None, Word | None] = {None: None}
        words |= {word: moved(word) for word in self.words}
        numbers = tuple(
            replace(moved(number), label=words[number.label], head=words[number.head])
            for number in self.numbers
        )
        return replace(
            self,
            words=tuple(map(moved, self.words)),
            numbers=numbers,
            nonsense=tuple(map(moved, self.nonsense)),
        )


def render_pages(
    pages: Sequence[Page], seed: int, *, clean: bool = False
) -> tuple[Tensor, list[list[tuple[float, float]]]]:
    """Images (B, 3, H, W) uint8, and the centre (x, y) in pixels of every text of each page.

    A text is a word, a number or a piece of nonsense; the centres of a page are in that order. All
    pages have one size. A text is as wide as its token and half as high. The texts of a row are all
    in the upper half of their tokens or all in the lower, each shifted by at most a pixel. Some are
    faint. Half of the pages have a photograph as background, unless they are `clean`.
    """
    size = pages[0].size
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    texts: list[tuple[int, int, int, int]] = []
    nonsense = list[str]()
    inks = list[float]()
    centres: list[list[tuple[float, float]]] = []
    for index, page in enumerate(pages):
        row_shift = [rng.choice((0, PATCH)) for _ in range(size.rows)]
        items = [(word.word, word.row, word.column) for word in page.words]
        items += [
            (len(WORDS) + number.value, number.row, number.column)
            for number in page.numbers
        ]
        for other in page.nonsense:
            items.append((len(WORDS) + 100 + len(nonsense), other.row, other.column))
            nonsense.append(other.text)
        centres.append([])
        for block, row, column in items:
            inks.append(rng.uniform(*_FAINT_INK) if rng.random() < _FAINT else 1)
            y = row * TOKEN + row_shift[row] + rng.randint(-1, 1)
            x = column * TOKEN + rng.randint(-1, 1)
            texts.append((index, block, y + 1, x + 1))
            centres[-1].append((x + TOKEN / 2, y + PATCH / 2))
    # A margin of one pixel on each side holds what is shifted beyond the edge.
    height, width = (side + 2 for side in size.pixels)
    ink = torch.zeros(len(pages) * height * width)
    image, block, y, x = torch.tensor(texts).T
    corner = (image * height + y) * width + x
    pixel = torch.arange(PATCH)[:, None] * width + torch.arange(TOKEN)
    target = corner[:, None, None] + pixel
    blocks = torch.cat((_text_blocks(), _word_blocks(nonsense)))[block]
    blocks = blocks * torch.tensor(inks)[:, None, None]
    ink.index_put_((target.flatten(),), blocks.flatten(), accumulate=True)
    ink = ink.view(len(pages), 1, height, width)[:, :, 1:-1, 1:-1].clamp(0, 1)

    inverse = torch.rand(len(pages), 1, 1, 1, generator=generator) < 0.2
    light = 215 + 35 * torch.rand(len(pages), 3, 1, 1, generator=generator)
    dark = 70 * torch.rand(len(pages), 3, 1, 1, generator=generator)
    paper = torch.where(inverse, dark, light)
    ink_colour = torch.where(inverse, light, dark)
    if not clean:
        strengths = [rng.uniform(0, 0.25) if rng.random() < 0.5 else 0 for _ in pages]
        photographs = cut_photographs(rng, len(pages), *size.pixels)
        paper = paper + torch.tensor(strengths)[:, None, None, None] * photographs
    pixels = paper * (1 - ink) + ink_colour * ink
    return add_grain(pixels, generator, clean=clean), centres


@functools.cache
def _text_blocks() -> Tensor:
    """Coverage (W + 100, PATCH, TOKEN) of all words in capitals, then of all two-digit numbers."""
    digits = _draw_glyphs(GLYPHS["digits"], 11, 4.2, 5.8)
    tens = torch.arange(100) // 10
    units = torch.arange(100) % 10
    numbers = F.pad(torch.cat((digits[tens], digits[units]), 2), (3, 3))
    return torch.cat((_word_blocks(WORDS), numbers))


def _word_blocks(words: Sequence[str]) -> Tensor:
    """Coverage (M, PATCH, TOKEN) of words of four letters in capitals."""
    letters = _draw_glyphs(GLYPHS["letters"], 6, 2.6, 5.4)
    places = [[ord(letter) - ord("a") for letter in word] for word in words]
    drawn = letters[torch.tensor(places, dtype=torch.long).view(-1, 4)]
    return F.pad(drawn.transpose(1, 2).flatten(2), (2, 2))


def _draw_glyphs(glyphs: Tensor, width: int, half_x: float, half_y: float) -> Tensor:
    """Coverage (G, PATCH, width) of glyphs, each centred in its block."""
    x = (torch.arange(width) + 0.5 - width / 2) / half_x
    y = (torch.arange(PATCH) + 0.5 - PATCH / 2) / half_y
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)
    grid = grid.expand(len(glyphs), -1, -1, -1)
    return F.grid_sample(glyphs[:, None], grid, align_corners=False)[:, 0]
