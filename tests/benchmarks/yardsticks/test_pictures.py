"""Scenes, pages, their questions and the held-out splits: what is asked is what is shown."""

from __future__ import annotations

import hashlib
import io
import random
import re
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.yardsticks import examples, pages
from benchmarks.yardsticks.examples import CHECKPOINTS, Example, Split, draw_examples
from benchmarks.yardsticks.pages import MERGE, TOKEN
from benchmarks.yardsticks.questions import (
    BRIEF,
    CATEGORIES,
    KINDS,
    SEEN,
    UNSEEN,
    Model,
    Questions,
)
from benchmarks.yardsticks.scenes import (
    CELLS,
    GRID,
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
            _, height, width = example.image.shape
            unseen_size = pages.Size(height // TOKEN, width // TOKEN) in pages.UNSEEN_SIZES
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


def test_evidence_begins_with_what_the_question_names() -> None:
    """Whether answers are right, the trained models tell: they give 99 % of them."""
    rng = random.Random(11)
    (scene,) = render_scenes([draw_scene(rng, "crowded")], CELLS, 11)[1]
    for kind in ("digit", "quarter", "reading", "position"):
        for question in Questions(rng, scene, (CELLS, CELLS), SEEN).generate(kind):
            (thing,) = [thing for thing in scene.things if thing.name in question.text]
            assert question.evidence == scene.patches[thing]
    page = pages.draw_page(rng, "table", pages.Size(6, 9))
    (question,) = Questions(rng, page, (0, 0), BRIEF).generate("cell")
    (number,) = [
        part for part in page.numbers if part.row * 9 + part.column == question.evidence[0]
    ]
    label, head = number.label, number.head
    assert label is not None and head is not None and question.answer == str(number.value)
    assert question.evidence[1:] == tuple(word.row * 9 + word.column for word in (label, head))
    assert question.text == f"row {label.text} under {head.text}"


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
