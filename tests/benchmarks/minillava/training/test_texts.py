"""Training texts: every kind occurs, no phrase is ambiguous, no unseen wording is used."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter

import pytest

from benchmarks.minillava.layout import TRAINING_STYLES, Canvas, draw_layout
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene, render
from benchmarks.minillava.training.texts import (
    HALF,
    NEIGHBOUR,
    PHRASE_KINDS,
    PhraseGenerator,
    caption,
    phrase_kind,
    pointing_phrase,
    training_phrases,
    training_questions,
)
from benchmarks.minillava.vocabulary import language_tokenizer
from benchmarks.minillava.wordings import BRIEF, KINDS, UNSEEN

CANVAS = Canvas()
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
Drawn = list[tuple[Scene, list[Question]]]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    rng = random.Random(3)
    layouts = [draw_layout(rng, style, CANVAS) for style in TRAINING_STYLES * 8]
    scenes = render(layouts, CANVAS, 3).scenes
    return [(scene, training_phrases(rng, scene, CANVAS, 60)) for scene in scenes]


def test_every_kind_of_phrase_occurs(drawn: Drawn) -> None:
    assert {one.kind for _, phrases in drawn for one in phrases} == set(PHRASE_KINDS)


def test_texts_are_the_same_in_every_process(drawn: Drawn) -> None:
    """The committed checkpoint was trained on these texts, so no order may depend on a set."""
    rng = random.Random(5)
    texts = [
        (phrases, training_questions(rng, scene, CANVAS, 20), pointing_phrase(rng, scene))
        for scene, phrases in drawn
    ]

    assert hashlib.sha256(repr(texts).encode()).hexdigest()[:16] == "bbd8061e133649c5"


def test_a_phrase_has_one_answer_in_its_scene(drawn: Drawn) -> None:
    for _, phrases in drawn:
        meanings: dict[str, set[tuple[str, str]]] = {}
        for one in phrases:
            meanings.setdefault(one.text, set()).add((one.kind, one.answer))
        assert all(len(kinds) == 1 for kinds in meanings.values())


def test_no_phrase_extends_another_one_by_its_answer(drawn: Drawn) -> None:
    for _, phrases in drawn:
        answered = {f"{one.text} {one.answer}" for one in phrases}
        assert not [one.text for one in phrases if one.text in answered]


def test_a_phrase_is_short(drawn: Drawn) -> None:
    tokenizer = language_tokenizer()
    lengths = [len(tokenizer.encode(f" {one.text}").ids) for _, some in drawn for one in some]
    assert max(lengths) <= 8 and sum(lengths) / len(lengths) < 4.5


def test_a_neighbour_is_named_before_its_digit(drawn: Drawn) -> None:
    seen = 0
    for scene, phrases in drawn:
        for phrase in phrases:
            if phrase.kind != phrase_kind(NEIGHBOUR):
                continue
            relation, name = phrase.text.removeprefix("shape ").split(" the ")
            (anchor,) = [thing for thing in scene.layout.things if thing.name == name]
            target = scene.layout.neighbour(anchor, *STEPS[relation])
            assert target is not None
            assert phrase.answer == f"{target.name} {target.digit}"
            assert phrase.evidence[0] == scene.patches(target)[0]
            seen += 1
    assert seen >= 20


def test_halves_are_left_and_right(drawn: Drawn) -> None:
    seen = 0
    for scene, phrases in drawn:
        columns = {f"half {thing.name}": thing.column for thing in scene.layout.things}
        halves = [one for one in phrases if one.kind == phrase_kind(HALF)]
        seen += len(halves)
        assert all(one.answer == ("left", "right")[columns[one.text] // 2] for one in halves)
    assert seen >= 20


def test_an_unknown_kind_is_refused(drawn: Drawn) -> None:
    with pytest.raises(ValueError, match="'sung' is not an open kind"):
        PhraseGenerator(random.Random(0), drawn[0][0], CANVAS, BRIEF).generate_phrase("sung")


@pytest.fixture(scope="module")
def scenes() -> tuple[Scene, ...]:
    rng = random.Random(11)
    layouts = [draw_layout(rng, style, CANVAS) for style in ("crowded", "signs") * 12]
    return render(layouts, CANVAS, 11).scenes


def test_training_never_uses_an_unseen_wording(scenes: tuple[Scene, ...]) -> None:
    slots = {
        "name": r"\w+ \w+", "a_name": r"an? \w+ \w+", "digit": r"\d", "number": r"\d",
        "plural": r"\w+( shapes)?", "side": r"\w+", "relation": r"\w+( of)?",
    }  # fmt: skip

    def pattern(wording: str) -> re.Pattern[str]:
        text = re.escape(wording).replace(r"\{", "{").replace(r"\}", "}").replace("\\_", "_")
        return re.compile(text.format(**slots))

    unseen = [pattern(text) for kind in KINDS for text in UNSEEN[kind]]
    questions = [
        question.text
        for number, scene in enumerate(scenes)
        for question in training_questions(random.Random(number), scene, CANVAS, 20)
    ]

    assert not [text for text in questions if any(one.fullmatch(text) for one in unseen)]


def test_training_asks_every_kind_of_question(scenes: tuple[Scene, ...]) -> None:
    questions = Counter(
        question.kind
        for number, scene in enumerate(scenes)
        for question in training_questions(random.Random(number), scene, CANVAS, 20)
    )

    assert set(questions) == set(KINDS)


def test_pointing_phrases_are_short_and_name_one_part(scenes: tuple[Scene, ...]) -> None:
    for number, scene in enumerate(scenes):
        phrase, patches = pointing_phrase(random.Random(number), scene)
        assert "?" not in phrase and len(phrase.split()) <= 3
        assert patches in {*scene.thing_patches, *scene.sign_patches}
        assert caption(random.Random(number), scene).count(",") == 2
