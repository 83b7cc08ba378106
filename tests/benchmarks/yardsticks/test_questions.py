"""Questions: answers are correct for what is shown, and evidence covers the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

import pytest

from benchmarks.yardsticks import pages
from benchmarks.yardsticks.questions import (
    BRIEF,
    CATEGORIES,
    KINDS,
    SEEN,
    UNSEEN,
    PageQuestions,
    Question,
    SceneQuestions,
    plural_of,
)
from benchmarks.yardsticks.scenes import (
    CELLS,
    COLOURS,
    SHAPES,
    Scene,
    Thing,
    draw_layout,
    render_scenes,
)

PAGE_KINDS = CATEGORIES["miniqwen"]["pages"]
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random(11)
    layouts = [draw_layout(rng, style) for style in ("crowded", "signs") * 12]
    return render_scenes(layouts, CELLS, 11)[1]


def test_every_kind_is_in_one_category_and_has_wordings_in_words_of_training() -> None:
    scenes, pictures = (
        [kind for kinds in CATEGORIES[model].values() for kind in kinds]
        for model in ("minillava", "miniqwen")
    )
    assert sorted(scenes) == sorted(KINDS)
    assert len(set(pictures)) == len(pictures)
    assert set(SEEN) == set(UNSEEN) == set(BRIEF) == {*KINDS, *PAGE_KINDS}
    assert all(not set(SEEN[kind]) & set(UNSEEN[kind]) for kind in SEEN)
    known, new = (
        {word.lower() for kind in KINDS for text in wordings[kind]
         for word in re.findall(r"\{?\w+\}?", text)}
        for wordings in (SEEN, UNSEEN)
    )  # fmt: skip
    assert new <= known


def named(scene: Scene, text: str) -> Thing:
    (thing,) = [thing for thing in scene.layout.things if thing.name in text]
    return thing


def digit_in(text: str) -> int:
    return int(re.findall(r"\d", text)[0])


def with_digit(scene: Scene, text: str) -> Thing:
    (thing,) = [thing for thing in scene.layout.things if thing.digit == digit_in(text)]
    return thing


def counted(scene: Scene, text: str) -> list[Thing]:
    return [
        thing
        for thing in scene.layout.things
        if f"{COLOURS[thing.colour]} shapes" in text or plural_of(SHAPES[thing.shape]) in text
    ]


def quarter(thing: Thing) -> str:
    return f"{'upper' if thing.row < 2 else 'lower'} {'left' if thing.column < 2 else 'right'}"


def neighbour(scene: Scene, text: str) -> Thing:
    (relation,) = [words for words in STEPS if words in text]
    target = scene.layout.neighbour(named(scene, text), *STEPS[relation])
    assert target is not None
    return target


def sign_number(scene: Scene, text: str) -> str:
    (sign,) = [sign for sign in scene.layout.signs if sign.name in text]
    return "".join(map(str, sign.number))


def in_half(scene: Scene, text: str) -> bool:
    sides = [side for side in ("left", "right", "upper", "lower") if f" {side} " in f" {text}"]
    return set(sides) <= set(quarter(named(scene, text)).split())


ANSWERS: Mapping[str, Callable[[Scene, str], object]] = {
    "digit": lambda scene, text: named(scene, text).digit,
    "colour": lambda scene, text: COLOURS[with_digit(scene, text).colour],
    "shape": lambda scene, text: SHAPES[with_digit(scene, text).shape],
    "text": sign_number,
    "count": lambda scene, text: len(counted(scene, text)),
    "quarter": lambda scene, text: quarter(named(scene, text)),
    "relation": lambda scene, text: neighbour(scene, text).digit,
    "existence": lambda scene, text: any(t.name in text for t in scene.layout.things),
    "reading": lambda scene, text: named(scene, text).digit == digit_in(text),
    "position": in_half,
    "counting": lambda scene, text: len(counted(scene, text)) == digit_in(text),
}
"""The answers by what a scene shows; true and false are yes and no."""


@pytest.mark.parametrize("kind", KINDS)
def test_answers_about_scenes_are_right_and_their_evidence_is_shown(
    scenes: list[Scene], kind: str
) -> None:
    asked = 0
    for number, scene in enumerate(scenes):
        for wordings in (SEEN, UNSEEN, BRIEF):
            source = SceneQuestions(random.Random(number), scene, (CELLS, CELLS), wordings)
            group = source.generate(kind) or ()
            asked += len(group)
            if len(group) == 2:
                assert [question.answer for question in group] == ["yes", "no"]
                assert group[0].text != group[1].text
            for question in group:
                answer = ANSWERS[kind](scene, question.text)
                if isinstance(answer, bool):
                    answer = "yes" if answer else "no"
                assert question.answer == str(answer)
                check_evidence(scene, question)
    assert asked >= 36


def check_evidence(scene: Scene, question: Question) -> None:
    """The most informative patches come first."""
    text, evidence = question.text, question.evidence
    match question.kind:
        case "text":  # in reading order
            assert len(evidence) == len(question.answer) and sorted(evidence) == list(evidence)
        case "relation":
            target, anchor = neighbour(scene, text), named(scene, text)
            assert set(evidence) == {*scene.patches(target), *scene.patches(anchor)}
            assert evidence[0] == scene.patches(target)[0]
        case "count" | "counting":
            middles = {scene.patches(thing)[0] for thing in counted(scene, text)}
            assert set(evidence[: len(middles)]) == middles
        case "colour" | "shape":
            assert evidence == scene.patches(with_digit(scene, text))
        case "existence" if question.answer == "no":
            assert evidence == ()
        case _:
            assert evidence == scene.patches(named(scene, text))


@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_answers_about_pages_are_right_and_their_evidence_is_shown(kind: str) -> None:
    asked: list[tuple[pages.Page, Question]] = []
    for seed in range(60):
        rng = random.Random(seed)
        page = pages.draw_page(rng, rng.choice(pages.PAGE_STYLES), rng.choice(pages.SIZES))
        questions = PageQuestions(rng, page, BRIEF).generate(kind) or ()
        asked += [(page, question) for question in questions]
    assert len(asked) > 15
    assert {question.answer for _, question in asked} == {"yes", "no"} or kind != "find"
    for page, question in asked:
        parts: list[pages.Word | pages.Number] = [*page.words, *page.numbers]
        places = {part.row * page.size.columns + part.column: part for part in parts}
        assert set(question.evidence) <= places.keys()
        texts = [*question.text.split(), question.answer]
        if kind == "find":
            shown = texts[1] in [word.text for word in page.words]
            assert question.answer == ("yes" if shown else "no")
            assert bool(question.evidence) == shown
            continue
        number = places[question.evidence[0]]
        assert isinstance(number, pages.Number) and number.label is not None
        if kind == "compare":
            values = {each.label.text: each.value for each in page.numbers if each.label}
            assert question.answer == max(texts[1], texts[3], key=values.__getitem__)
        else:
            assert str(number.value) in texts and number.label.text in texts
            assert number.head is None or number.head.text in texts


def test_quarters_of_a_wide_scene_are_those_of_its_rectangle() -> None:
    size = pages.Size(6, 12)
    rows, columns = size.cells
    for seed in range(20):
        rng = random.Random(seed)
        _, (scene,) = pages.render_rectangles([pages.draw_rectangle(rng, size)], size, seed)
        questions = SceneQuestions(rng, scene, size.cells, BRIEF).generate("quarter")
        assert questions is not None
        thing = named(scene, questions[0].text)
        vertical = "upper" if thing.row < rows / 2 else "lower"
        horizontal = "left" if thing.column < columns / 2 else "right"
        assert questions[0].answer == f"{vertical} {horizontal}"
