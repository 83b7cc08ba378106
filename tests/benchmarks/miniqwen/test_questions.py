"""Questions about pages have the answer that the page shows, and its tokens as evidence."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Question
from benchmarks.miniqwen.pages import PAGE_STYLES, Number, Page, Word, draw_page
from benchmarks.miniqwen.questions import PageQuestions, SceneQuestions
from benchmarks.miniqwen.render import render_scenes, scene_cells
from benchmarks.miniqwen.scenes import draw_scene
from benchmarks.miniqwen.sizes import SIZES, Size
from benchmarks.miniqwen.wordings import BRIEF, PAGE_KINDS


def _asked(kind: str) -> Iterator[tuple[Page, Question]]:
    """Questions of a kind as phrases, with their pages."""
    for seed in range(60):
        rng = random.Random(seed)
        page = draw_page(rng, rng.choice(PAGE_STYLES), rng.choice(SIZES))
        for question in PageQuestions(rng, page, BRIEF).generate(kind) or ():
            yield page, question


@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_every_kind_is_asked_and_its_evidence_is_on_the_page(kind: str) -> None:
    asked = list(_asked(kind))
    assert len(asked) > 15
    for page, question in asked:
        parts: list[Word | Number] = [*page.words, *page.numbers]
        places = {one.row * page.size.columns + one.column for one in parts}
        assert set(question.evidence) <= places
        assert bool(question.evidence) == (question.answer != "no")


@pytest.mark.parametrize("kind", ["value", "cell", "word"])
def test_numbers_are_next_to_the_words_that_the_question_names(kind: str) -> None:
    for page, question in _asked(kind):
        number = next(
            one
            for one in page.numbers
            if one.row * page.size.columns + one.column == question.evidence[0]
        )
        assert number.label is not None
        texts = [*question.text.split(), question.answer]
        assert str(number.value) in texts and number.label.text in texts
        assert number.head is None or number.head.text in texts


def test_the_larger_of_two_numbers_is_found() -> None:
    for page, question in _asked("compare"):
        values = {one.label.text: one.value for one in page.numbers if one.label}
        _, first, _, second = question.text.split()
        assert question.answer == max(first, second, key=values.__getitem__)


def test_found_words_are_on_the_page_and_others_are_not() -> None:
    answers = set()
    for page, question in _asked("find"):
        word = question.text.split()[1]
        assert (question.answer == "yes") == (word in [one.text for one in page.words])
        answers.add(question.answer)
    assert answers == {"yes", "no"}


def test_quarters_of_a_wide_scene_are_those_of_its_rectangle() -> None:
    size = Size(6, 12)
    rows, columns = scene_cells(size)
    for seed in range(20):
        rng = random.Random(seed)
        _, scenes = render_scenes([draw_scene(rng, size)], size, seed)
        questions = SceneQuestions(rng, scenes[0], Canvas(), BRIEF, size).generate("quarter")
        assert questions is not None
        name = questions[0].text.removeprefix("quarter ")
        thing = next(one for one in scenes[0].layout.things if one.name == name)
        vertical = "upper" if thing.row < rows / 2 else "lower"
        horizontal = "left" if thing.column < columns / 2 else "right"
        assert questions[0].answer == f"{vertical} {horizontal}"
