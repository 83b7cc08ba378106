"""Pages: every word and number occurs once, at a place of its own, with the words that name it."""

from __future__ import annotations

import random

import pytest

from benchmarks.miniqwen.pages import PAGE_STYLES, WORDS, Number, Page, PageStyle, Word, draw_page
from benchmarks.miniqwen.sizes import SIZES, UNSEEN_SIZES


def _pages(style: PageStyle, most: int = len(WORDS)) -> list[Page]:
    sizes = (*SIZES, *UNSEEN_SIZES)
    return [draw_page(random.Random(i), style, sizes[i % len(sizes)], most) for i in range(60)]


@pytest.mark.parametrize("style", PAGE_STYLES)
def test_words_numbers_and_places_are_unique_and_on_the_page(style: PageStyle) -> None:
    for page in _pages(style):
        assert len({word.word for word in page.words}) == len(page.words) < len(WORDS)
        assert len({number.value for number in page.numbers}) == len(page.numbers)
        parts: list[Word | Number] = [*page.words, *page.numbers]
        places = [(part.row, part.column) for part in parts]
        assert len(set(places)) == len(places)
        assert all(0 <= r < page.size.rows and 0 <= c < page.size.columns for r, c in places)


def test_numbers_of_lists_are_right_of_their_words() -> None:
    for page in _pages("list"):
        for number in page.numbers:
            assert number.label is not None and number.head is None
            assert (number.row, number.column) == (number.label.row, number.label.column + 1)


def test_numbers_of_tables_are_in_the_row_and_column_of_their_words() -> None:
    for page in _pages("table"):
        for number in page.numbers:
            assert number.label is not None and number.head is not None
            assert (number.row, number.column) == (number.label.row, number.head.column)
            assert number.label.column < number.column and number.head.row < number.row


@pytest.mark.parametrize("style", PAGE_STYLES)
def test_easy_pages_have_few_words(style: PageStyle) -> None:
    assert all(len(page.words) <= 5 for page in _pages(style, most=5))
