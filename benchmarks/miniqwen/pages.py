"""Pages: lists of words with numbers, and tables, one word or number per visual token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.miniqwen.sizes import Size

WORDS: tuple[str, ...] = (
    "bird", "boat", "book", "cake", "coin", "desk", "door", "duck",
    "fish", "fork", "frog", "gift", "hand", "hill", "jazz", "king",
    "lamp", "leaf", "milk", "moon", "nest", "pear", "quiz", "rain",
    "rose", "ship", "snow", "sock", "star", "tree", "vase", "wolf",
)  # fmt: skip
NUMBERS = range(10, 100)
# Words that stay off every page, for the questions whose answer is "no".
_RESERVED = 4

PageStyle = Literal["list", "table"]
PAGE_STYLES: tuple[PageStyle, ...] = ("list", "table")


@dataclass(frozen=True)
class Word:
    """A word, an index into `WORDS`, at a place in tokens."""

    word: int
    row: int
    column: int

    @property
    def text(self) -> str:
        """The word in lower case, as questions write it; pages show capitals."""
        return WORDS[self.word]


@dataclass(frozen=True)
class Number:
    """A number of two digits, the word on its left, and in a table the word above its column."""

    value: int
    row: int
    column: int
    label: Word | None
    head: Word | None = None


@dataclass(frozen=True)
class Page:
    """The content of one page."""

    style: PageStyle
    size: Size
    words: tuple[Word, ...]
    numbers: tuple[Number, ...]


def draw_page(rng: random.Random, style: PageStyle, size: Size, most: int = len(WORDS)) -> Page:
    """Draw a random page of at most so many words, each of which it shows once, as its numbers."""
    most = max(4, min(most, len(WORDS) - _RESERVED))
    return _draw_list(rng, size, most) if style == "list" else _draw_table(rng, size, most)


def _draw_list(rng: random.Random, size: Size, most: int) -> Page:
    """Columns of words, most with a number on their right."""
    pitch = rng.choice((2, 3))
    margin = rng.randint(0, size.columns % pitch)
    starts = range(margin, size.columns - 1, pitch)
    places = [(row, column) for row in range(size.rows) for column in starts]
    fill = rng.uniform(0.5, 0.95)
    count = min(max(3, round(fill * len(places))), most)
    names = rng.sample(range(len(WORDS)), count)
    values = rng.sample(NUMBERS, count)
    words, numbers = list[Word](), list[Number]()
    for (row, column), name, value in zip(
        sorted(rng.sample(places, count)), names, values, strict=True
    ):
        word = Word(name, row, column)
        words.append(word)
        if len(numbers) < 2 or rng.random() < 0.9:
            numbers.append(Number(value, row, column + 1, word))
    return Page("list", size, tuple(words), tuple(numbers))


def _draw_table(rng: random.Random, size: Size, most: int) -> Page:
    """A table with one row of words above its columns and one column of words beside its rows."""
    columns = rng.randint(2, min(6, size.columns - 1, most - 2))
    rows = rng.randint(2, min(size.rows - 1, most - columns))
    top = rng.randint(0, size.rows - 1 - rows)
    left = rng.randint(0, size.columns - 1 - columns)
    names = rng.sample(range(len(WORDS)), rows + columns)
    heads = [Word(name, top, left + 1 + i) for i, name in enumerate(names[:columns])]
    labels = [Word(name, top + 1 + i, left) for i, name in enumerate(names[columns:])]
    values = iter(rng.sample(NUMBERS, rows * columns))
    numbers = [
        Number(next(values), label.row, head.column, label, head)
        for label in labels
        for head in heads
    ]
    return Page("table", size, (*heads, *labels), tuple(numbers))
