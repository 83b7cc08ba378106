"""Phrases: every kind is told, no phrase means two things, and neighbours are told in order."""

from __future__ import annotations

import random

import pytest

from benchmarks.minillava.layout import TRAINING_STYLES, Canvas, draw_layout
from benchmarks.minillava.phrases import (
    BESIDE,
    HALF,
    PHRASE_KINDS,
    Teller,
    brief,
    training_phrases,
)
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene, render
from benchmarks.minillava.vocabulary import language_tokenizer
from benchmarks.minillava.wordings import BRIEF

CANVAS = Canvas()
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
Told = list[tuple[Scene, list[Question]]]


@pytest.fixture(scope="module")
def told() -> Told:
    rng = random.Random(3)
    layouts = [draw_layout(rng, style, CANVAS) for style in TRAINING_STYLES * 8]
    scenes = render(layouts, CANVAS, 3).scenes
    return [(scene, training_phrases(rng, scene, CANVAS, 60)) for scene in scenes]


def test_every_kind_is_told(told: Told) -> None:
    assert {one.kind for _, phrases in told for one in phrases} == set(PHRASE_KINDS)


def test_a_phrase_about_a_scene_means_one_thing(told: Told) -> None:
    for _, phrases in told:
        meanings: dict[str, set[tuple[str, str]]] = {}
        for one in phrases:
            meanings.setdefault(one.text, set()).add((one.kind, one.answer))
        assert all(len(found) == 1 for found in meanings.values())


def test_no_phrase_begins_as_another_one_ends(told: Told) -> None:
    for _, phrases in told:
        answered = {f"{one.text} {one.answer}" for one in phrases}
        assert not [one.text for one in phrases if one.text in answered]


def test_a_phrase_is_short(told: Told) -> None:
    tokenizer = language_tokenizer()
    lengths = [len(tokenizer.encode(f" {one.text}").ids) for _, some in told for one in some]
    assert max(lengths) <= 8 and sum(lengths) / len(lengths) < 4.5


def test_a_neighbour_is_named_before_its_digit_is_told(told: Told) -> None:
    seen = 0
    for scene, phrases in told:
        for phrase in phrases:
            if phrase.kind != brief(BESIDE):
                continue
            relation, name = phrase.text.removeprefix("shape ").split(" the ")
            (anchor,) = [thing for thing in scene.layout.things if thing.name == name]
            target = scene.layout.neighbour(anchor, *STEPS[relation])
            assert target is not None
            assert phrase.answer == f"{target.name} {target.digit}"
            assert phrase.evidence[0] == scene.patches(target)[0]
            seen += 1
    assert seen >= 20


def test_halves_are_left_and_right(told: Told) -> None:
    seen = 0
    for scene, phrases in told:
        columns = {f"half {thing.name}": thing.column for thing in scene.layout.things}
        halves = [one for one in phrases if one.kind == brief(HALF)]
        seen += len(halves)
        assert all(one.answer == ("left", "right")[columns[one.text] // 2] for one in halves)
    assert seen >= 20


def test_an_unknown_kind_is_refused(told: Told) -> None:
    with pytest.raises(ValueError, match="'sung' is not an open kind"):
        Teller(random.Random(0), told[0][0], CANVAS, BRIEF).tell("sung")
