"""Scenes, pages, their questions and the held-out splits: what is asked is what is shown."""

from __future__ import annotations

import hashlib
import io
import random
import re
from collections.abc import Iterator
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.yardsticks import examples, pages
from benchmarks.yardsticks.examples import CHECKPOINTS, Example, Split, draw_examples
from benchmarks.yardsticks.pages import MERGE, TOKEN, Number, Page, Word
from benchmarks.yardsticks.questions import (
    BRIEF,
    CATEGORIES,
    KINDS,
    SEEN,
    UNSEEN,
    Model,
    Question,
    Questions,
    plural_of,
)
from benchmarks.yardsticks.scenes import (
    CELLS,
    COLOURS,
    GRID,
    SHAPES,
    Scene,
    Sign,
    Style,
    Thing,
    draw_scene,
    render_scenes,
)
from benchmarks.yardsticks.train_miniqwen import shrink_size

MODELS: tuple[Model, ...] = get_args(Model)
PAGE_KINDS = CATEGORIES["miniqwen"]["pages"]
EVERY_SIZE = (*pages.SIZES, *pages.UNSEEN_SIZES)
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}


@pytest.mark.parametrize(
    ("model", "digest", "moments"),
    [
        ("minillava", "38a2c89ac0516a96", (130.3908, 45.7212, 130.3892)),
        ("miniqwen", "6701d69dad73a5ca", (131.3984, 75.5445, 131.3978)),
    ],
)
def test_the_splits_are_those_of_published_figures(
    model: Model, digest: str, moments: tuple[float, float, float]
) -> None:
    """The last bit of few pixels depends on the processor and the number of threads."""
    drawn = [example for name in get_args(Split) for example in draw_examples(name, 4, model)]
    parts = [(e.question, e.answer, e.kind, e.pair, e.evidence) for e in drawn]
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == digest
    pixels = torch.cat([example.image.flatten() for example in drawn]).double()
    weights = torch.arange(len(pixels)) % 97
    places = (pixels * weights).mean() / weights.double().mean()
    figures = [float(part) for part in (pixels.mean(), pixels.std(), places)]
    assert figures == pytest.approx(moments, abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_splits_are_disjoint_and_only_the_test_split_is_new(model: Model) -> None:
    for seeds, others in combinations(examples.SEEDS.values(), 2):
        assert seeds.stop <= others.start or others.stop <= seeds.start
        assert max(seeds.stop, others.stop) <= 2**32
    drawn, few = draw_examples("test", 8, model), draw_examples("test", 3, model)
    for example, prefix in zip(drawn, few, strict=False):
        assert example.question == prefix.question and torch.equal(example.image, prefix.image)
    image = np.asarray(Image.open(io.BytesIO(examples.png(drawn[0].image))))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), drawn[0].image)
    each = 1 if model == "minillava" else 2
    for example in drawn:
        turn = example.image_id // each % 4
        assert (example.unseen_style, example.unseen_wording) == (turn == 1, turn == 3)
        if model == "miniqwen":
            unseen_size = examples.image_size(example.image) in pages.UNSEEN_SIZES
            assert unseen_size == example.unseen_style
            assert example.kind in CATEGORIES[model]["pages" if example.image_id % 2 else "scenes"]
    seen = draw_examples("search", 4, model)
    assert not any(example.unseen_style or example.unseen_wording for example in seen)
    pairs: dict[int, list[Example]] = {}
    for example in drawn:
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(example)
    for pair in pairs.values():
        assert [example.answer for example in pair] == ["yes", "no"]
        assert len({(example.image_id, example.kind) for example in pair}) == 1
    with pytest.raises(ValueError, match=r"must lie in 1\.\.5000"):
        draw_examples("test", 5001, model)


def test_every_kind_is_in_one_category_and_has_wordings_in_words_of_training() -> None:
    listed = {model: [k for kinds in CATEGORIES[model].values() for k in kinds] for model in MODELS}
    assert sorted(listed["minillava"]) == sorted(KINDS)
    assert len(set(listed["miniqwen"])) == len(listed["miniqwen"])
    assert set(SEEN) == set(UNSEEN) == set(BRIEF) == {*KINDS, *PAGE_KINDS}
    assert not any(set(SEEN[kind]) & set(UNSEEN[kind]) for kind in SEEN)
    known, new = (
        {word.lower() for kind in KINDS for text in wordings[kind]
         for word in re.findall(r"\{?\w+\}?", text)}
        for wordings in (SEEN, UNSEEN)
    )  # fmt: skip
    assert new <= known


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (" 4821", "4821", True),
        (" 482", "4821", False),
        (" Upper left.", "upper left", True),
        (" upper right", "upper left", False),
        ("YES, it is", "yes", True),
        ("", "3", False),
    ],
)
def test_answers_must_start_with_all_words_of_the_reference(
    answer: str, reference: str, right: bool
) -> None:
    assert examples.is_right(answer, reference) is right


def test_grades_are_by_kind_and_by_pair() -> None:
    image = torch.zeros(3, 168, 168, dtype=torch.uint8)
    rows = [
        ("digit", "7", None), ("existence", "yes", 0), ("existence", "no", 0),
        ("position", "yes", 1), ("position", "no", 1),
    ]  # fmt: skip
    asked = [Example(0, image, "?", answer, kind, pair, ()) for kind, answer, pair in rows]
    grades = examples.grade_answers(asked, [" 8", " yes", " no", " yes", " yes"])
    assert (grades.accuracy, grades.accuracy_plus) == (3 / 5, 1 / 2)
    assert grades.by_kind == {"digit": 0, "existence": 1, "position": 1 / 2}


@pytest.mark.parametrize("style", get_args(Style))
def test_shapes_and_signs_share_no_cell_and_no_name(style: Style) -> None:
    drawn = [draw_scene(random.Random(seed), style) for seed in range(40)]
    for scene in render_scenes(drawn, CELLS, 3)[1]:
        parts: list[Thing | Sign] = [*scene.things, *scene.signs]
        assert len({part.name for part in parts}) == len(parts)
        for thing in scene.things:
            middle, *_ = scene.patches[thing]
            assert middle == (thing.row * 3 + 1) * GRID + thing.column * 3 + 1
        cells = [
            {(patch // GRID // 3, patch % GRID // 3) for patch in scene.patches[part]}
            for part in parts
        ]
        assert len(set.union(*cells)) == sum(map(len, cells)), "a sign has two, others one"
        assert style != "ring" or all({t.row, t.column} & {0, 3} for t in scene.things)


def answer_scene(scene: Scene, question: Question) -> tuple[str, list[int]]:
    """The answer by what a scene shows, and the patches that must be first in the evidence."""
    text, kind = question.text, question.kind
    named = [thing for thing in scene.things if thing.name in text]
    digits = [int(digit) for digit in re.findall(r"\d", text)]
    carrying = [thing for thing in scene.things if [thing.digit] == digits]
    counted = [
        thing
        for thing in scene.things
        if f"{COLOURS[thing.colour]} shapes" in text or plural_of(SHAPES[thing.shape]) in text
    ]
    answer: object
    match kind:
        case "digit" | "reading":
            (thing,), answer = named, named[0].digit
            answer = [thing.digit] == digits if kind == "reading" else thing.digit
            return say(answer), [*scene.patches[thing]]
        case "colour" | "shape":
            (thing,) = carrying
            name = COLOURS[thing.colour] if kind == "colour" else SHAPES[thing.shape]
            return name, [*scene.patches[thing]]
        case "text":
            (sign,) = [sign for sign in scene.signs if sign.name in text]
            return sign.text, [*scene.patches[sign]]
        case "count" | "counting":
            answer = [len(counted)] == digits if kind == "counting" else len(counted)
            return say(answer), [scene.patches[thing][0] for thing in counted]
        case "quarter" | "position":
            (thing,) = named
            halves = ("upper", "lower")[thing.row >= 2], ("left", "right")[thing.column >= 2]
            asked = re.findall(r"\b(left|right|upper|lower)\b", text)
            answer = {*asked} <= {*halves} if asked else " ".join(halves)
            return say(answer), [*scene.patches[thing]]
        case "relation":
            (relation,) = [words for words in STEPS if words in text]
            target = scene.neighbour(named[0], *STEPS[relation])
            assert target is not None
            return str(target.digit), [scene.patches[target][0], scene.patches[named[0]][0]]
    assert kind == "existence"
    return say(bool(named)), [patch for thing in named for patch in scene.patches[thing]]


def say(answer: object) -> str:
    return {True: "yes", False: "no"}[answer] if isinstance(answer, bool) else str(answer)


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random(11)
    drawn = [draw_scene(rng, style) for style in get_args(Style)[1:3] * 12]
    return render_scenes(drawn, CELLS, 11)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_about_scenes_are_right_and_their_evidence_is_shown(
    scenes: list[Scene], kind: str
) -> None:
    asked = 0
    for number, scene in enumerate(scenes):
        for wordings in (SEEN, UNSEEN, BRIEF):
            group = Questions(random.Random(number), scene, (CELLS, CELLS), wordings).generate(kind)
            asked += len(group)
            assert len(group) < 2 or [question.answer for question in group] == ["yes", "no"]
            for question in group:
                answer, evidence = answer_scene(scene, question)
                assert question.answer == answer
                assert {*question.evidence[: len(evidence)]} == {*evidence}
    assert asked >= 36


@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_answers_about_pages_are_right_and_their_evidence_is_shown(kind: str) -> None:
    asked = set()
    for page, question in ask_pages(kind):
        texts = [*question.text.split(), question.answer]
        asked.add(question.answer)
        parts: list[Word | Number] = [*page.words, *page.numbers]
        places = {part.row * page.size.columns + part.column: part for part in parts}
        assert len(places) == len(parts), "no part is over another"
        assert all(part.row < page.size.rows and part.column < page.size.columns for part in parts)
        values = {number.name: number.value for number in page.numbers if page.style == "list"}
        shown = [places[token] for token in question.evidence]
        if kind == "find":
            assert question.answer == say(texts[1] in [word.text for word in page.words])
            assert [part.text for part in shown if isinstance(part, Word)] == (
                [texts[1]] if question.answer == "yes" else []
            )
        elif kind == "compare":
            assert question.answer == max(texts[1], texts[3], key=values.__getitem__)
            assert isinstance(shown[1], Number) and {shown[1].name} <= {*texts}
        else:
            number, *names = shown
            assert isinstance(number, Number) and str(number.value) in texts
            assert {name.text for name in names if isinstance(name, Word)} <= {*texts}
            assert len(names) == (2 if kind == "cell" else 1)
    assert len(asked) > 15 or asked == {"yes", "no"}


def ask_pages(kind: str) -> Iterator[tuple[Page, Question]]:
    for seed in range(60):
        rng = random.Random(seed)
        page = pages.draw_page(rng, rng.choice(pages.PAGE_STYLES), rng.choice(EVERY_SIZE))
        for question in Questions(rng, page, (0, 0), BRIEF).generate(kind):
            yield page, question


def test_a_wide_scene_has_its_own_quarters_and_visual_tokens() -> None:
    size = pages.Size(6, 12)
    scene = pages.draw_rectangle(random.Random(1), size)
    images, (scene,) = pages.render_rectangles([scene], size, 2)
    assert images.shape == (1, 3, 6 * TOKEN, 12 * TOKEN)
    for thing, tokens in scene.patches.items():
        assert tokens[0] == (thing.row * 3 + 1) // 2 * 12 + (thing.column * 3 + 1) // 2
        assert max(tokens) < size.tokens
    for seed in range(9):
        (question,) = Questions(random.Random(seed), scene, size.cells, BRIEF).generate("quarter")
        (thing,) = [thing for thing in scene.things if thing.name in question.text]
        sides = ("upper", "lower")[thing.row >= 2], ("left", "right")[thing.column >= 4]
        assert question.answer == " ".join(sides)


def test_a_word_changes_the_pixels_of_its_token() -> None:
    words = [(Word(word, 2, 4), Word(9, 5, 8)) for word in (3, 8)]
    page, other = (Page("list", pages.Size(6, 9), pair, ()) for pair in words)
    images, centres = pages.render_pages([page, page], 1)
    changed, _ = pages.render_pages([other, page], 1)
    rows, columns = (images != changed)[0].any(0).nonzero(as_tuple=True)
    assert len(rows) > 20
    # Lines are shifted by up to one pixel.
    assert rows.min() >= 2 * TOKEN - 1 and rows.max() <= 3 * TOKEN
    assert columns.min() >= 4 * TOKEN - 1 and columns.max() <= 5 * TOKEN
    assert abs(centres[0][0][0] - 4.5 * TOKEN) <= 1
    assert torch.equal(images[1], changed[1])


@pytest.mark.parametrize("divisor", [1, 2, 4, 8, 16])
def test_resizing_and_patches_are_those_of_the_processor(divisor: int) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINTS["miniqwen"]).image_processor
    for size in EVERY_SIZE:
        budget = size.tokens // divisor
        seen = shrink_size(size, budget)
        assert seen.tokens <= budget
        images, _ = pages.render_pages([pages.draw_page(random.Random(3), "table", size)], 3)
        limits = {"shortest_edge": TOKEN * TOKEN, "longest_edge": budget * TOKEN * TOKEN}
        inputs = processor(images[0], size=limits, return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, seen.rows * MERGE, seen.columns * MERGE]]
        frames = inputs["pixel_values"].unflatten(1, (3, 2, -1))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        patches = pages.split_patches(pages.resize_images(images, seen))[0].flatten(0, 1).float()
        difference = (patches - frames[:, :, 0].flatten(1)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.08 and difference.mean() < 0.01
