"""Labels name what each patch shows, at every resolution."""

from __future__ import annotations

import random

import torch

from benchmarks.minillava.render import Scene
from benchmarks.miniqwen.pages import Page, Word, draw_page
from benchmarks.miniqwen.sizes import MERGE, SIZES, Size
from benchmarks.miniqwen.training.pictures import (
    FIELDS,
    View,
    draw_pictures,
    draw_view,
    patch_centres,
)

FIELD = {name: place for place, name in enumerate(FIELDS)}
SIZE = Size(6, 6)


def test_patches_are_in_the_order_of_their_tokens() -> None:
    centres = patch_centres(Size(2, 3)) / 14 - 0.5
    assert centres[:6].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0]]
    assert len(centres) == 2 * 3 * MERGE**2


def test_a_word_labels_two_patches_of_its_token_and_one_at_half_size() -> None:
    for seen, expected in ((SIZE, 2), (Size(3, 3), 1)):
        pictures = draw_pictures(2, 0, 4, View(SIZE, seen), most=4)
        for index, page in enumerate(pictures.contents):
            assert isinstance(page, Page)
            word = page.words[0]
            labelled = pictures.labels[FIELD["word"], index] == word.word
            own = labelled & (pictures.labels[FIELD["kind"], index] == 1)
            assert own.sum() == expected
            scale = SIZE.rows // seen.rows
            row, column = word.row // scale, word.column // scale
            tokens = own.nonzero()[:, 0] // MERGE**2
            assert set(tokens.tolist()) == {row * seen.columns + column}


def test_a_patch_that_shows_several_words_is_labelled_with_none() -> None:
    pictures = draw_pictures(2, 0, 4, View(SIZE, Size(2, 2)), plain=True)
    kinds, words = (pictures.labels[FIELD[name]] for name in ("kind", "word"))
    assert (kinds > 0).float().mean() > 0.9
    assert (words >= 0).float().mean() < 0.2


def test_numbers_are_labelled_with_their_digits_and_words() -> None:
    pictures = draw_pictures(4, 0, 3, View(SIZE, SIZE))
    for index, page in enumerate(pictures.contents):
        assert isinstance(page, Page)
        labels = pictures.labels[:, index].view(len(FIELDS), SIZE.tokens, -1)
        for number in page.numbers:
            token = labels[:, number.row * SIZE.columns + number.column]
            shown = token[:, token[FIELD["kind"]] == 2]
            assert shown.shape[1] == 2 and isinstance(number.label, Word)
            values = shown[FIELD["tens"]] * 10 + shown[FIELD["units"]]
            assert set(values.tolist()) == {number.value}
            assert set(shown[FIELD["word"]].tolist()) == {number.label.word}


def test_one_patch_of_a_shape_has_its_digit() -> None:
    pictures = draw_pictures(5, 2, 0, View(SIZE, SIZE))
    digits = (pictures.labels[FIELD["digit"]] >= 0).sum(1).tolist()
    scenes = [content for content in pictures.contents if isinstance(content, Scene)]
    assert digits == [len(scene.layout.things) for scene in scenes]


def test_views_are_full_size_or_what_the_processor_makes_of_a_budget() -> None:
    views = [draw_view(seed, (0.5, 0.2, 0.1, 0.1, 0.1)) for seed in range(100)]
    full = [view for view in views if view.seen == view.size]
    assert 30 < len(full) < 70
    assert {view.size for view in views} == set(SIZES)
    assert all(view.seen.tokens <= view.size.tokens // 2 for view in views if view not in full)


def test_the_same_seed_gives_the_same_pictures() -> None:
    one, other = (draw_pictures(8, 1, 1, View(SIZE, SIZE)) for _ in range(2))
    assert torch.equal(one.patches, other.patches)
    assert draw_page(random.Random(1), "list", SIZE) == draw_page(random.Random(1), "list", SIZE)
