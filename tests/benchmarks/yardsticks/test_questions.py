"""Questions: answers are correct for what is shown, and evidence covers the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from benchmarks.yardsticks.pages import (
    PAGE_STYLES,
    SIZES,
    Number,
    Page,
    Size,
    Word,
    draw_page,
    draw_rectangle,
    render_rectangles,
)
from benchmarks.yardsticks.questions import (
    BRIEF,
    CATEGORIES,
    KINDS,
    SEEN,
    UNSEEN,
    PageQuestions,
    Question,
    SceneQuestions,
    name_plural,
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


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random(11)
    layouts = [draw_layout(rng, style) for style in ("crowded", "signs") * 12]
    return render_scenes(layouts, CELLS, 11)[1]


def _generate(scenes: list[Scene], kind: str) -> list[tuple[Scene, list[Question]]]:
    groups = []
    for number, scene in enumerate(scenes):
        for wordings in (SEEN, UNSEEN, BRIEF):
            rng = random.Random(number)
            group = SceneQuestions(rng, scene, (CELLS, CELLS), wordings).generate(kind)
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
    scenes, pictures = (
        [kind for kinds in CATEGORIES[model].values() for kind in kinds]
        for model in ("minillava", "miniqwen")
    )
    assert sorted(scenes) == sorted(KINDS)
    assert len(set(pictures)) == len(pictures)
    assert set(SEEN) == set(UNSEEN) == set(BRIEF) == {*KINDS, *PAGE_KINDS}
    assert all(not set(SEEN[kind]) & set(UNSEEN[kind]) for kind in SEEN)


def test_unseen_wordings_are_made_of_words_that_training_reads() -> None:
    def words(texts: list[str]) -> set[str]:
        return {word.lower() for text in texts for word in re.findall(r"\{?\w+\}?", text)}

    known = words([text for kind in KINDS for text in SEEN[kind]])
    new = words([text for kind in KINDS for text in UNSEEN[kind]])

    assert new <= known


@pytest.mark.parametrize("kind", ["existence", "reading", "position", "counting"])
def test_pairs_are_a_yes_and_a_no(scenes: list[Scene], kind: str) -> None:
    for _, group in _generate(scenes, kind):
        assert [question.answer for question in group] == ["yes", "no"]
        assert group[0].text != group[1].text


def test_digits_colours_and_shapes_are_those_of_the_named_shape(
    scenes: list[Scene],
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


def test_the_evidence_of_a_number_is_in_reading_order(scenes: list[Scene]) -> None:
    for scene, (question,) in _generate(scenes, "text"):
        (sign,) = [sign for sign in scene.layout.signs if sign.name in question.text]
        assert question.answer == "".join(map(str, sign.number))
        assert len(question.evidence) == len(question.answer)
        assert sorted(question.evidence) == list(question.evidence)


def test_the_answer_to_a_relation_is_beside_the_named_shape(scenes: list[Scene]) -> None:
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
    scenes: list[Scene],
) -> None:
    for kind in ("count", "counting"):
        for scene, group in _generate(scenes, kind):
            question, things = group[0], scene.layout.things
            counted = [
                thing
                for thing in things
                if f"{COLOURS[thing.colour]} shapes" in question.text
                or name_plural(SHAPES[thing.shape]) in question.text
            ]
            middles = {scene.patches(thing)[0] for thing in counted}
            number = question.answer if kind == "count" else re.findall(r"\d", question.text)[0]
            assert number == str(len(counted))
            assert set(question.evidence[: len(counted)]) == middles


def test_sides_and_quarters_are_right(scenes: list[Scene]) -> None:
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


def test_existence_and_reading_are_right(scenes: list[Scene]) -> None:
    for scene, (yes, no) in _generate(scenes, "existence"):
        assert yes.evidence == scene.patches(_named(scene, yes.text))
        assert no.evidence == ()
        assert not any(thing.name in no.text for thing in scene.layout.things)
    for scene, group in _generate(scenes, "reading"):
        for question in group:
            digit = int(re.findall(r"\d", question.text)[0])
            right = digit == _named(scene, question.text).digit
            assert right == (question.answer == "yes")


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
    rows, columns = size.cells
    for seed in range(20):
        rng = random.Random(seed)
        _, scenes = render_rectangles([draw_rectangle(rng, size)], size, seed)
        questions = SceneQuestions(rng, scenes[0], size.cells, BRIEF).generate("quarter")
        assert questions is not None
        name = questions[0].text.removeprefix("quarter ")
        thing = next(one for one in scenes[0].layout.things if one.name == name)
        vertical = "upper" if thing.row < rows / 2 else "lower"
        horizontal = "left" if thing.column < columns / 2 else "right"
        assert questions[0].answer == f"{vertical} {horizontal}"


def test_an_unknown_kind_is_refused(scenes: list[Scene]) -> None:
    with pytest.raises(ValueError, match="'sung' is not a kind"):
        SceneQuestions(random.Random(0), scenes[0], (CELLS, CELLS), SEEN).generate("sung")
