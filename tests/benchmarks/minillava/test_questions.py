"""Questions: answers are correct for the scene, and evidence covers the answer."""

from __future__ import annotations

import random
import re

import pytest

from benchmarks.minillava.layout import COLOURS, SHAPES, Canvas, Thing, draw_layout
from benchmarks.minillava.questions import Question, QuestionGenerator
from benchmarks.minillava.render import Scene, render
from benchmarks.minillava.wordings import (
    BRIEF,
    CATEGORIES,
    KINDS,
    PAIR_KINDS,
    SEEN,
    UNSEEN,
    name_plural,
)

CANVAS = Canvas()


@pytest.fixture(scope="module")
def scenes() -> tuple[Scene, ...]:
    rng = random.Random(11)
    layouts = [draw_layout(rng, style, CANVAS) for style in ("crowded", "signs") * 12]
    return render(layouts, CANVAS, 11).scenes


def _generate(scenes: tuple[Scene, ...], kind: str) -> list[tuple[Scene, list[Question]]]:
    groups = []
    for number, scene in enumerate(scenes):
        for wordings in (SEEN, UNSEEN, BRIEF):
            generator = QuestionGenerator(random.Random(number), scene, CANVAS, wordings)
            group = generator.generate(kind)
            if group is not None:
                groups.append((scene, group))
    assert len(groups) >= 36
    return groups


def _named(scene: Scene, text: str) -> Thing:
    (thing,) = [thing for thing in scene.layout.things if thing.name in text]
    return thing


def _sides(thing: Thing) -> set[str]:
    return {"upper" if thing.row < 2 else "lower", "left" if thing.column < 2 else "right"}


def test_every_kind_is_in_one_category_and_has_wordings() -> None:
    listed = [kind for kinds in CATEGORIES.values() for kind in kinds]

    assert sorted(listed) == sorted(KINDS)
    assert set(SEEN) == set(UNSEEN) == set(BRIEF) == set(KINDS)
    assert all(not set(SEEN[kind]) & set(UNSEEN[kind]) for kind in KINDS)


def test_unseen_wordings_are_made_of_words_that_training_reads() -> None:
    def words(texts: tuple[str, ...]) -> set[str]:
        return {word.lower() for text in texts for word in re.findall(r"\{?\w+\}?", text)}

    known = words(tuple(text for kind in KINDS for text in SEEN[kind]))
    new = words(tuple(text for kind in KINDS for text in UNSEEN[kind]))

    assert new <= known


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_pairs_are_a_yes_and_a_no(scenes: tuple[Scene, ...], kind: str) -> None:
    for _, group in _generate(scenes, kind):
        assert [question.answer for question in group] == ["yes", "no"]
        assert group[0].text != group[1].text


def test_digits_colours_and_shapes_are_those_of_the_named_shape(
    scenes: tuple[Scene, ...],
) -> None:
    for scene, (question,) in _generate(scenes, "digit"):
        thing = _named(scene, question.text)
        assert question.answer == str(thing.digit)
        assert question.evidence == scene.patches(thing)
    for kind, words, field in (("colour", COLOURS, "colour"), ("shape", SHAPES, "shape")):
        for scene, (question,) in _generate(scenes, kind):
            digit = int(re.findall(r"\d", question.text)[0])
            (thing,) = [thing for thing in scene.layout.things if thing.digit == digit]
            number = thing.colour if field == "colour" else thing.shape
            assert question.answer == words[number]


def test_the_evidence_of_a_number_is_in_reading_order(scenes: tuple[Scene, ...]) -> None:
    for scene, (question,) in _generate(scenes, "text"):
        (sign,) = [sign for sign in scene.layout.signs if sign.name in question.text]
        assert question.answer == "".join(map(str, sign.number))
        assert len(question.evidence) == len(question.answer)
        assert sorted(question.evidence) == list(question.evidence)


def test_the_answer_to_a_relation_is_beside_the_named_shape(scenes: tuple[Scene, ...]) -> None:
    steps = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
    for scene, (question,) in _generate(scenes, "relation"):
        anchor = _named(scene, question.text)
        (relation,) = [words for words in steps if words in question.text]
        down, right = steps[relation]
        target = scene.layout.neighbour(anchor, down, right)
        assert target is not None
        assert question.answer == str(target.digit)
        assert set(question.evidence) == {*scene.patches(target), *scene.patches(anchor)}
        assert question.evidence[0] == scene.patches(target)[0]


def test_counts_are_right_and_their_evidence_starts_with_middles(
    scenes: tuple[Scene, ...],
) -> None:
    for kind in ("count", "counting"):
        for scene, group in _generate(scenes, kind):
            question, things = group[0], scene.layout.things
            counted = [
                thing
                for thing in things
                if name_plural(thing.colour, None) in question.text
                or name_plural(None, thing.shape) in question.text
            ]
            middles = {scene.patches(thing)[0] for thing in counted}
            number = question.answer if kind == "count" else re.findall(r"\d", question.text)[0]
            assert number == str(len(counted))
            assert set(question.evidence[: len(counted)]) == middles


def test_sides_and_quarters_are_right(scenes: tuple[Scene, ...]) -> None:
    for scene, (question,) in _generate(scenes, "quarter"):
        assert set(question.answer.split()) == _sides(_named(scene, question.text))
    for scene, group in _generate(scenes, "position"):
        for question in group:
            sides = _sides(_named(scene, question.text))
            named = {
                side
                for side in ("left", "right", "upper", "lower")
                if f" {side} " in f" {question.text}"
            }
            assert (named <= sides) == (question.answer == "yes")


def test_existence_and_reading_are_right(scenes: tuple[Scene, ...]) -> None:
    for scene, (yes, no) in _generate(scenes, "existence"):
        assert yes.evidence == scene.patches(_named(scene, yes.text))
        assert no.evidence == ()
        assert not any(thing.name in no.text for thing in scene.layout.things)
    for scene, group in _generate(scenes, "reading"):
        for question in group:
            digit = int(re.findall(r"\d", question.text)[0])
            right = digit == _named(scene, question.text).digit
            assert right == (question.answer == "yes")
