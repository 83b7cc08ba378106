"""Scenes, pages, their questions and the held-out splits: what is asked is what is shown."""

from __future__ import annotations

import hashlib
import io
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.yardsticks import clips, pages
from benchmarks.yardsticks.examples import CHECKPOINTS, SEEDS, Split, draw_examples
from benchmarks.yardsticks.pages import MERGE, TOKEN, Nonsense, Number, Page, Word
from benchmarks.yardsticks.questions import (
    CATEGORIES,
    SEEN,
    Model,
    Questions,
    _SceneFacts,
)
from benchmarks.yardsticks.scenes import WORDS, Scene, Sign, Thing
from tests.tables import parametrize_from_file


@parametrize_from_file("model", "images", "digest", "moments")
def test_the_splits_are_those_of_published_figures(
    model: Model, images: int, digest: str, moments: tuple[float, float, float]
) -> None:
    """The last bit of few pixels depends on the processor and the number of threads."""
    drawn = [
        example
        for name in get_args(Split)
        for example in draw_examples(name, images, model)
    ]
    parts = [(e.question, e.answer, e.kind, e.pair, e.evidence) for e in drawn]
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == digest
    pixels = torch.cat([example.image.flatten() for example in drawn]).double()
    weights = torch.arange(len(pixels)) % 97
    places = (pixels * weights).mean() / weights.double().mean()
    figures = [float(part) for part in (pixels.mean(), pixels.std(), places)]
    assert figures == pytest.approx(moments, abs=1e-3)


@pytest.mark.parametrize("model", ["minillava", "miniqwen", "miniintern", "minigemma"])
def test_clean_pictures_are_the_same_without_grain(model: Model) -> None:
    grained, clean = (
        draw_examples("test", 4, model, clean=clean) for clean in (False, True)
    )
    assert [e.question for e in grained] == [e.question for e in clean]
    for example, other in zip(grained, clean, strict=True):
        grain = example.image.double() - other.image
        page = model != "minillava" and example.image_id % 2
        # Half of the papers show a photograph, but no clean one does.
        assert 4 < grain[grain != 0].std() < (12 if page else 6)
        assert abs(float(grain.mean())) < (4 if page else 2)
        if page:
            _, counts = other.image.flatten(1).unique(dim=1, return_counts=True)
            assert counts.max() > counts.sum() / 2, "most of a page is its paper"


def test_clutter_is_not_what_questions_are_about() -> None:
    """So that its tokens are evidence of nothing, and answers do not depend on it."""
    for seed in range(40):
        rng = random.Random(seed)
        size = rng.choice(pages.SIZES)
        scene = size.draw_scene(rng)
        page = Page.draw(rng, "list", size)
        things = [*scene.things, *scene.marks]
        assert len({(thing.row, thing.column) for thing in things}) == len(things) > 4
        (image,), (rendered,) = size.render_scenes([scene], seed, clean=True)
        (bare,), (other,) = size.render_scenes(
            [replace(scene, marks=())], seed, clean=True
        )
        assert rendered.patches == other.patches and not image.equal(bare)
        parts: list[Word | Number | Nonsense] = [
            *page.words,
            *page.numbers,
            *page.nonsense,
        ]
        assert len({(part.row, part.column) for part in parts}) == len(parts)
        assert not {part.text for part in page.nonsense} & {*WORDS}
        contents: dict[str, tuple[Scene | Page, Scene | Page]] = {
            "scenes": (rendered, other),
            "pages": (page, replace(page, nonsense=())),
        }
        for shown, both in contents.items():
            for kind in CATEGORIES["miniqwen"][shown]:
                asked, expected = (
                    Questions(random.Random(1), content, size.cells, SEEN).generate(
                        kind
                    )
                    for content in both
                )
                assert asked == expected


def test_no_number_above_five_is_asked_for() -> None:
    things = [Thing(0, 0, digit, 0, digit, 10.0, (0.0, 0.0)) for digit in range(5)]
    patches: dict[Thing | Sign, tuple[int, ...]] = {t: (t.column,) for t in things}
    scene = Scene(tuple(things), patches=patches)
    numbers = set[str | int]()
    for seed in range(40):
        facts = _SceneFacts(random.Random(seed), scene, (1, 5)).draw("counting")
        numbers |= {slots["number"] for _, _, slots in facts}
    assert numbers == {0, 1, 4, 5}


def test_splits_are_disjoint_and_fewer_images_are_the_first_ones() -> None:
    for seeds, others in combinations(SEEDS.values(), 2):
        assert max(seeds.start, others.start) >= min(seeds.stop, others.stop)
        assert max(seeds.stop, others.stop) <= 2**32
    drawn = draw_examples("test", 3)
    few = draw_examples("test", 1)
    assert [e.question for e in few] == [e.question for e in drawn if e.image_id == 0]
    image = np.asarray(Image.open(io.BytesIO(drawn[0].png)))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), few[0].image)


def test_answers_must_start_with_all_words_of_the_reference() -> None:
    (example, *_) = draw_examples("test", 1)
    for answer, reference in (
        (" 4821", "4821"),
        (" Upper left.", "upper left"),
        ("YES, it", "yes"),
    ):
        assert replace(example, answer=reference).is_right(answer)
    for answer, reference in (
        (" 482", "4821"),
        (" upper right", "upper left"),
        ("", "3"),
    ):
        assert not replace(example, answer=reference).is_right(answer)


@pytest.mark.parametrize("divisor", [1, 4, 16])
def test_resizing_and_patches_are_those_of_the_processor(divisor: int) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINTS["miniqwen"]).image_processor
    for size in (*pages.SIZES, *pages.UNSEEN_SIZES):
        budget = size.tokens // divisor
        seen = size.limit(budget)
        assert seen.tokens <= budget
        images, _ = pages.render_pages([Page.draw(random.Random(3), "table", size)], 3)
        # Without what goes beyond black and white, which torchvision clamps after rows and columns.
        images = (60 + images * (130 / 255)).round().to(torch.uint8)
        limits = {
            "shortest_edge": TOKEN * TOKEN,
            "longest_edge": budget * TOKEN * TOKEN,
        }
        inputs = processor(images[0], size=limits, return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [
            [1, seen.rows * MERGE, seen.columns * MERGE]
        ]
        frames = inputs["pixel_values"].unflatten(1, (3, 2, -1))
        patches = seen.split_patches(images)[0].flatten(0, 1)
        difference = (patches[:, None] - frames.transpose(1, 2).flatten(2)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.03 and difference.mean() < 0.01


@pytest.mark.parametrize(("drawn", "frames"), [(8, 8), (32, 32), (16, 8), (8, 4)])
def test_what_happens_in_a_clip_is_what_is_asked_and_all_else_stands_still(
    drawn: int, frames: int
) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        images, clip = (
            clips.Clip.draw(rng, drawn).sample(frames).render(seed, clean=True)
        )
        assert len(images) == len(clip.frames) == frames
        places = [
            {thing.name: (thing.row, thing.column) for thing in s.things}
            for s in clip.frames
        ]
        every = [*dict.fromkeys(name for place in places for name in place)]
        (mover,) = [
            name for name in every if len({p[name] for p in places if name in p}) > 1
        ]
        guests = [name for name in every if not all(name in place for place in places)]
        (rows, columns) = places[0][mover]
        (to_row, to_column) = places[-1][mover]
        moved = (to_row - rows, to_column - columns)
        board = clip.board.name
        digits = [
            thing.digit
            for s in clip.frames
            for thing in s.things
            if thing.name == board
        ]
        answers = {
            "moves": {mover},
            "passes": {str(len(guests))},
            "appears": {guests[0], guests[-1]},
            "where": {
                {(0, 3): "right", (3, 0): "down", (0, -3): "left", (-3, 0): "up"}[moved]
            },
            "shows": {str(digits[0]), str(digits[-1])},
        }
        for kind, expected in answers.items():
            said = {clip.ask(kind, rng)[1] for _ in range(20)}
            assert said == expected
        assert guests[0] not in places[0] and 1 <= len(guests) <= 4
        brief = clips.Clip.draw(random.Random(seed), drawn, brief=True)
        shown = Counter(thing.name for scene in brief.frames for thing in scene.things)
        assert {shown[guest.name] for guest in brief.visitors} == {1}
        # Of a frame only the tokens of what has changed differ from those of the frame before.
        for at in range(1, frames):
            changed = {
                token
                for scene, other in ((at, at - 1), (at - 1, at))
                for thing in {*clip.frames[scene].things} - {*clip.frames[other].things}
                for token in clip.frames[scene].patches[thing][
                    : None if thing.name != board else 1
                ]
            }
            pixels = (images[at] != images[at - 1]).any(0)
            differs = pixels.view(6, TOKEN, 6, TOKEN).any(3).any(1).flatten()
            # Edges of a shape reach into tokens of which it covers little.
            assert changed <= {*differs.nonzero().flatten().tolist()}
            assert bool(changed) == bool(differs.any())
