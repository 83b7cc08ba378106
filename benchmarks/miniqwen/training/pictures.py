"""Training pictures: scenes and pages of one size at one resolution, with labels per patch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.minillava.layout import COLOURS, PATCH, SHAPES, Layout
from benchmarks.minillava.render import Scene
from benchmarks.miniqwen.pages import NUMBERS, PAGE_STYLES, WORDS, Number, Page, Word, draw_page
from benchmarks.miniqwen.render import (
    PlacedText,
    render_pages,
    render_scenes,
    resize_images,
    scene_cells,
    split_patches,
    thing_centre,
)
from benchmarks.miniqwen.scenes import MOST_SHAPES, draw_scene
from benchmarks.miniqwen.sizes import MERGE, SIZES, TOKEN, Size, shrink_size

UNLABELLED = -1
FIELDS: dict[str, int] = {
    "kind": 4, "word": len(WORDS), "head": len(WORDS) + 1, "tens": 10, "units": 10,
    "colour": len(COLOURS), "shape": len(SHAPES), "digit": 10, "lower": 2, "right": 2,
}  # fmt: skip
"""Fields of dense labels, and their numbers of classes.

kind: 0 background, 1 word, 2 number, 3 shape; word: of a word itself, of a number the word beside
it; head: of a number in a table the word above it, the last class elsewhere.
"""
_NO_HEAD = len(WORDS)


@dataclass(frozen=True)
class View:
    """A size of pictures and the size at which the model sees them.

    The processor makes it of an image limited to one token in `divisor`.
    """

    size: Size
    seen: Size
    divisor: int = 1


def draw_view(seed: int, shares: Sequence[float]) -> View:
    """Draw a view; `shares` are of all tokens, and of a half, fourth, eighth and sixteenth."""
    rng = random.Random(seed)
    size = rng.choice(SIZES)
    divisor = rng.choices((1, 2, 4, 8, 16), shares)[0]
    seen = size if divisor == 1 else shrink_size(size, size.tokens // divisor)
    return View(size, seen, divisor)


@dataclass(frozen=True)
class Pictures:
    """Patches (B, N, MERGE², 3 · PATCH²), labels (fields, B, N · MERGE²), and their contents."""

    patches: Tensor
    labels: Tensor
    contents: tuple[Scene | Page, ...]


def fill_page(rng: random.Random, size: Size) -> Page:
    """A page with a word or number in nearly every place, without relations between them."""
    words, numbers = list[Word](), list[Number]()
    for row in range(size.rows):
        for column in range(size.columns):
            if rng.random() < 0.4:
                words.append(Word(rng.randrange(len(WORDS)), row, column))
            elif rng.random() < 0.9:
                numbers.append(Number(rng.choice(NUMBERS), row, column, None))
    return Page("list", size, tuple(words), tuple(numbers))


def draw_pictures(
    seed: int, scenes: int, pages: int, view: View, plain: bool = False, most: int | None = None
) -> Pictures:
    """Draw scenes and then pages; `plain` pages are full of unrelated words and numbers.

    `most` makes them easier: scenes of at most so many shapes, pages of at most so many words.
    """
    rng = random.Random(seed)
    size = view.size
    images: list[Tensor] = []
    contents: list[Scene | Page] = []
    rows: list[list[float]] = []
    if scenes:
        layouts = [draw_scene(rng, size, most or MOST_SHAPES) for _ in range(scenes)]
        drawn, shown = render_scenes(layouts, size, seed)
        images.append(drawn)
        contents += shown
        for index, layout in enumerate(layouts):
            rows += _shape_rows(index, layout, size)
    if pages:
        texts = [
            fill_page(rng, size)
            if plain
            else draw_page(rng, rng.choice(PAGE_STYLES), size, most or len(WORDS))
            for _ in range(pages)
        ]
        drawn, places = render_pages(texts, seed)
        images.append(drawn)
        contents += texts
        for index, (page, of_page) in enumerate(zip(texts, places, strict=True), scenes):
            rows += _text_rows(index, page, of_page)
    patches = split_patches(resize_images(torch.cat(images), view.seen))
    return Pictures(
        patches, _label_patches(torch.tensor(rows), scenes + pages, view), tuple(contents)
    )


def _shape_rows(index: int, layout: Layout, size: Size) -> list[list[float]]:
    """Image, centre, half extents and labels of every shape of a scene."""
    rows: list[list[float]] = []
    height, width = scene_cells(size)
    for thing in layout.things:
        x, y = thing_centre(thing.row, thing.column, thing.shift)
        lower, right = thing.row >= height // 2, thing.column >= width // 2
        half = 0.8 * thing.radius
        labels = [3, -1, -1, -1, -1, thing.colour, thing.shape, thing.digit, lower, right]
        rows.append([index, x, y, half, half, *labels])
    return rows


def _text_rows(index: int, page: Page, places: Sequence[PlacedText]) -> list[list[float]]:
    """Image, centre, half extents and labels of every word and number of a page."""
    rows: list[list[float]] = []
    rest = [UNLABELLED] * 5
    boxes = [[index, place.x, place.y, TOKEN / 2, PATCH / 2] for place in places]
    for word, box in zip(page.words, boxes, strict=False):
        rows.append([*box, 1, word.word, UNLABELLED, UNLABELLED, UNLABELLED, *rest])
    for number, box in zip(page.numbers, boxes[len(page.words) :], strict=True):
        label = number.label.word if number.label else UNLABELLED
        head = number.head.word if number.head else _NO_HEAD
        if number.label is None:
            head = UNLABELLED
        rows.append([*box, 2, label, head, number.value // 10, number.value % 10, *rest])
    return rows


def patch_centres(size: Size) -> Tensor:
    """Centres (P, 2) in pixels, x and y, of all patches in the order of their tokens."""
    patch = torch.arange(size.tokens * MERGE * MERGE)
    token, inner = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
    row = token // size.columns * MERGE + inner // MERGE
    column = token % size.columns * MERGE + inner % MERGE
    return (torch.stack((column, row), 1) + 0.5) * PATCH


def _label_patches(items: Tensor, count: int, view: View) -> Tensor:
    """Labels (fields, B, P) of items (M, 5 + fields); a patch of two items has a kind only."""
    scale = torch.tensor([view.seen.width / view.size.width, view.seen.height / view.size.height])
    centres = patch_centres(view.seen)
    distance = centres - items[:, None, 1:3] * scale
    reach = (items[:, None, 3:5] * scale).clamp(min=PATCH / 2)
    item, patch = (distance.abs() < reach).all(-1).nonzero(as_tuple=True)
    image = items[item, 0].long()
    labels = torch.full((len(FIELDS), count, len(centres)), UNLABELLED)
    labels[0] = 0
    covers = torch.zeros(count, len(centres), dtype=torch.long)
    covers.index_put_((image, patch), torch.ones_like(patch), accumulate=True)
    labels[:, image, patch] = items[item, 5:].T.long()
    labels[1:, covers > 1] = UNLABELLED
    # A shape's digit is in its middle; elsewhere it would be one of several copies.
    digit = list(FIELDS).index("digit")
    off_centre = (distance[item, patch].abs() >= PATCH / 2).any(-1)
    labels[digit, image[off_centre], patch[off_centre]] = UNLABELLED
    return labels
