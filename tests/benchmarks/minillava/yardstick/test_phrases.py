"""Phrases: what is said is true of the scene."""

from __future__ import annotations

import random

import pytest

from benchmarks.minillava.yardstick.layout import (
    TRAINING_STYLES,
    Canvas,
    Layout,
    Thing,
    draw_layout,
)
from benchmarks.minillava.yardstick.phrases import PHRASE_KINDS, Teller, training_phrases
from benchmarks.minillava.yardstick.questions import Question
from benchmarks.minillava.yardstick.render import Scene, render
from benchmarks.minillava.yardstick.wordings import plural

CANVAS = Canvas()
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}


@pytest.fixture(scope="module")
def told() -> list[tuple[Layout, Question]]:
    rng = random.Random(3)
    layouts = [draw_layout(rng, style, CANVAS) for style in TRAINING_STYLES * 8]
    scenes: tuple[Scene, ...] = render(layouts, CANVAS, 3).scenes
    return [
        (scene.layout, phrase)
        for scene in scenes
        for phrase in training_phrases(rng, scene, CANVAS, 30)
    ]


def _of_kind(told: list[tuple[Layout, Question]], kind: str) -> list[tuple[Layout, Question]]:
    found = [(layout, phrase) for layout, phrase in told if phrase.kind == kind]
    assert len(found) >= 20
    return found


def _place(thing: Thing) -> str:
    rows, columns = ("upper", "lower"), ("left", "right")
    return f"{rows[thing.row // 2]} {columns[thing.column // 2]}"


def test_every_kind_is_told(told: list[tuple[Layout, Question]]) -> None:
    assert {phrase.kind for _, phrase in told} == set(PHRASE_KINDS)


def test_a_name_tells_digit_and_place_or_no(told: list[tuple[Layout, Question]]) -> None:
    missing = 0
    for layout, phrase in _of_kind(told, "named"):
        named = {thing.name: f"{thing.digit} {_place(thing)}" for thing in layout.things}
        assert phrase.answer == named.get(phrase.text, "no")
        assert bool(phrase.evidence) == (phrase.text in named)
        missing += phrase.text not in named
    assert missing


def test_a_digit_tells_name_and_place(told: list[tuple[Layout, Question]]) -> None:
    for layout, phrase in _of_kind(told, "found"):
        bearers = [thing for thing in layout.things if phrase.text == f"digit {thing.digit}"]
        assert [f"{thing.name} {_place(thing)}" for thing in bearers] == [phrase.answer]


def test_a_neighbour_is_told_whole(told: list[tuple[Layout, Question]]) -> None:
    for layout, phrase in _of_kind(told, "beside"):
        relation, name = phrase.text.split(" the ")
        (anchor,) = [thing for thing in layout.things if thing.name == name]
        down, right = STEPS[relation]
        (target,) = [
            thing
            for thing in layout.things
            if (thing.row, thing.column) == (anchor.row + down, anchor.column + right)
        ]
        assert phrase.answer == f"{target.digit} {target.name}"


def test_a_sign_is_read(told: list[tuple[Layout, Question]]) -> None:
    for layout, phrase in _of_kind(told, "read"):
        assert {sign.name: sign.text for sign in layout.signs}[phrase.text] == phrase.answer


def test_shapes_are_counted(told: list[tuple[Layout, Question]]) -> None:
    for layout, phrase in _of_kind(told, "counted"):
        bearing = [
            thing
            for thing in layout.things
            if phrase.text in (plural(thing.colour, None), plural(None, thing.shape))
        ]
        assert str(len(bearing)) == phrase.answer


def test_an_unknown_kind_is_refused(told: list[tuple[Layout, Question]]) -> None:
    rng = random.Random(0)
    scene = render([told[0][0]], CANVAS, 0).scenes[0]
    with pytest.raises(ValueError, match="'sung' is not a kind of phrase"):
        Teller(rng, scene, CANVAS).tell("sung")
