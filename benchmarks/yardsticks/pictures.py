"""Pictures of trainings: drawn scenes and pages, the dense labels of their patches, and texts.

They suit any model whose tokens cover squares of patches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

import torch
from torch import Tensor

from benchmarks.yardsticks import pages
from benchmarks.yardsticks.examples import keep_first
from benchmarks.yardsticks.pages import TOKEN, Number, Page, Size, Word
from benchmarks.yardsticks.questions import BRIEF, SEEN, Question, Questions
from benchmarks.yardsticks.scenes import CELL, COLOURS, PATCH, SHAPES, WORDS, Scene
from benchmarks.yardsticks.training import UNLABELLED, Recipe

FIELDS: Mapping[str, int] = {
    "kind": 5,
    "word": len(WORDS),
    "head": len(WORDS) + 1,
    "tens": 10,
    "units": 10,
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "digit": 10,
    "lower": 2,
    "right": 2,
    "letter": 26,
}
"""Fields of dense labels of patches, and their numbers of classes.

kind: 0 background, 1 word, 2 number, 3 shape, 4 mark or nonsense; word: the word itself or, on a
number, the word beside it; head: on a number of a table, the word above it, elsewhere the last
class; letter: that of a mark, or the first one of nonsense.
"""
FIELD_WEIGHTS = {"digit": 2.0, "tens": 1.5, "units": 1.5, "word": 1.5, "letter": 0.5}

_Item = Sequence[float]
"""A shape, mark or text: index of its picture, centre and half extents in pixels, and labels."""


@dataclass(frozen=True)
class Drawing:
    """Images (B, 3, H, W) uint8 of scenes, then pages, all of one size.

    items (M, 5 + fields) are the shapes, marks and texts of all pictures.
    """

    size: Size
    images: Tensor
    items: Tensor
    contents: Sequence[Scene | Page]

    @classmethod
    def draw(
        cls,
        seed: int,
        size: Size,
        scene_count: int,
        page_count: int,
        *,
        plain: bool = False,
        maximum: int | None = None,
    ) -> Drawing:
        """Draw scenes, then pages; with `plain` all pages are full ones.

        `maximum` makes pictures easier: it limits the shapes of a scene and the words of a page.
        """
        rng = random.Random(seed)
        max_shapes = maximum or pages.MAX_SHAPES
        scenes = [size.draw_scene(rng, max_shapes) for _ in range(scene_count)]
        images, scenes = size.render_scenes(scenes, seed)
        texts = []
        for _ in range(page_count):
            style: pages.PageStyle = "full" if plain else rng.choice(pages.PAGE_STYLES)
            texts.append(size.draw_page(rng, style, maximum or len(WORDS)))
        page_images, centres = pages.render_pages(texts, seed)
        items = list[_Item]()
        for index, scene in enumerate(scenes):
            items += _list_scene_items(index, scene, size)
        for index, page in enumerate(texts):
            items += _list_page_items(len(scenes) + index, page, centres[index])
        return cls(
            size,
            torch.cat((images, page_images)),
            torch.tensor(items),
            [*scenes, *texts],
        )


def _list_scene_items(index: int, scene: Scene, size: Size) -> Iterator[_Item]:
    height, width = size.cells
    for thing in (*scene.things, *scene.marks):
        if thing.letter is None:
            labels = _label(
                kind=3,
                colour=thing.colour,
                shape=thing.shape,
                digit=thing.digit,
                lower=thing.row >= height // 2,
                right=thing.column >= width // 2,
            )
        else:
            labels = _label(kind=4, letter=thing.letter)
        x = (thing.column + 0.5) * CELL + thing.shift[0]
        y = (thing.row + 0.5) * CELL + thing.shift[1]
        extent = 0.8 * thing.radius
        yield [index, x, y, extent, extent, *labels]


def _list_page_items(
    index: int, page: Page, centres: Sequence[tuple[float, float]]
) -> Iterator[_Item]:
    labels = [_label(kind=1, word=word.word) for word in page.words]
    for number in page.numbers:
        names = {}
        if number.label is not None:
            head = number.head.word if number.head else len(WORDS)
            names = {"word": number.label.word, "head": head}
        tens, units = divmod(number.value, 10)
        labels.append(_label(kind=2, tens=tens, units=units, **names))
    for part in page.nonsense:
        labels.append(_label(kind=4, letter=ascii_lowercase.index(part.text[0])))
    for centre, values in zip(centres, labels, strict=True):
        yield [index, *centre, TOKEN / 2, PATCH / 2, *values]


def _label(**fields: int) -> list[int]:
    """Labels of all fields in their order; fields without a value are unlabelled."""
    return [int(fields.get(name, UNLABELLED)) for name in FIELDS]


def label_patches(items: Tensor, count: int, centres: Tensor) -> Tensor:
    """Labels (fields, B, P) from items (M, 5 + fields); a patch of two items has only a kind.

    Patches have centres (P, 2), x and y, in the pixels in which the items are placed.
    """
    distance = centres - items[:, None, 1:3]
    reach = items[:, None, 3:5].clamp(min=PATCH / 2)
    item, patch = (distance.abs() < reach).all(-1).nonzero(as_tuple=True)
    image = items[item, 0].long()
    labels = torch.full((items.shape[1] - 5, count, len(centres)), UNLABELLED)
    labels[0] = 0
    covers = torch.zeros(count, len(centres), dtype=torch.long)
    covers.index_put_((image, patch), torch.ones_like(patch), accumulate=True)
    labels[:, image, patch] = items[item, 5:].T.long()
    labels[1:, covers > 1] = UNLABELLED
    # A shape's digit labels only its middle, which shows it; labels of a text are on all of its
    # patches.
    off_centre = (distance[item, patch].abs() >= PATCH / 2).any(-1)
    off_centre &= items[item, 3] == items[item, 4]
    for field in ("digit", "letter"):
        index = [*FIELDS].index(field)
        labels[index, image[off_centre], patch[off_centre]] = UNLABELLED
    return labels


def scale_items(
    items: Tensor, scale: tuple[float, float], offset: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Items in a resized picture, or in a part of it whose first pixel is at `offset` (x, y)."""
    scaled = items.clone()
    scaled[:, 1:3] = items[:, 1:3] * torch.tensor(scale) - torch.tensor(offset)
    scaled[:, 3:5] = items[:, 3:5] * torch.tensor(scale)
    return scaled


def draw_texts(
    rng: random.Random,
    content: Scene | Page,
    size: Size,
    recipe: Recipe,
    behind: str,
    *,
    phrases_only: bool,
) -> list[Question]:
    """Draw questions, which end with `behind`, and phrases about a picture, or only phrases."""
    kinds = recipe.phrases if phrases_only else recipe.questions
    weights = kinds["pages" if isinstance(content, Page) else "scenes"]
    source = Questions(rng, content, size.cells, SEEN)
    number = 0 if phrases_only else 12
    texts = source.draw_texts(weights, number, "{question}" + behind)
    source = replace(source, wordings=BRIEF)
    return texts + source.draw_texts(weights, 40 if phrases_only else 12, " {question}")


def keep_parts(
    rng: random.Random, content: Scene | Page, size: Size, budget: int
) -> list[int]:
    """Select `budget` tokens of a picture, ascending: those that texts are about, then others."""
    if isinstance(content, Page):
        parts: list[Word | Number] = [*content.words, *content.numbers]
        evidence = [size.token(part.row, part.column) for part in parts]
    else:
        evidence = [
            token
            for thing in content.things
            for token in content.patches[thing][: size.copies]
        ]
    rng.shuffle(evidence)
    return keep_first(rng, evidence, budget, size.tokens)
