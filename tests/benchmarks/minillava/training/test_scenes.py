"""Training scenes: seeds without collisions, easier layouts, labels that repeat the layout."""

from __future__ import annotations

import random

import pytest

from benchmarks.minillava.layout import (
    COLOURS,
    MAX_SHAPES,
    NEIGHBOURS,
    SEEDS,
    SHAPES,
    Canvas,
    draw_layout,
)
from benchmarks.minillava.render import Batch, render
from benchmarks.minillava.training.scenes import (
    UNLABELLED,
    label_patches,
    training_scenes,
    training_seed,
    unify_names,
)

CANVAS = Canvas()


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = random.Random(3)
    return render([draw_layout(rng, "signs", CANVAS) for _ in range(6)], CANVAS, 3)


def test_training_seeds_differ_by_seed_stage_step_and_rank() -> None:
    drawn = [
        training_seed(seed, stage, step, rank)
        for seed in (0, 7, 127)
        for stage in range(8)
        for step in (0, 1, 2**17 - 1)
        for rank in range(2)
    ]

    assert len(set(drawn)) == len(drawn)
    assert all(seed in SEEDS["train"] for seed in drawn)


def test_unified_names_differ_in_one_word_and_the_shapes_stay_in_place() -> None:
    crowded = [draw_layout(random.Random(seed), "crowded", CANVAS) for seed in range(40)]
    kinds = set()
    for seed, layout in enumerate(crowded):
        unified = unify_names(random.Random(seed), layout)
        shapes = {thing.shape for thing in unified.things}
        colours = {thing.colour for thing in unified.things}
        kinds.add((len(shapes) == 1, len(colours) == 1))
        assert sorted((len(shapes), len(colours))) == [1, len(unified.things)]
        assert len(unified.things) in (5, 8)
        assert [(t.row, t.column, t.digit) for t in unified.things] == [
            (t.row, t.column, t.digit) for t in layout.things[: len(unified.things)]
        ]
        assert unified.signs == layout.signs
    assert kinds == {(True, False), (False, True)}


def test_a_maximum_of_shapes_makes_scenes_easier() -> None:
    few, all_ = (training_scenes(5, 16, CANVAS, maximum) for maximum in (2, MAX_SHAPES))
    whole = training_scenes(5, 16, CANVAS)

    assert [len(scene.layout.things) for scene in few.scenes] == [2] * 16
    same = [a.layout == b.layout for a, b in zip(all_.scenes, whole.scenes, strict=True)]
    assert 0 < sum(same) < 16  # the names of the others are unified


def test_labels_repeat_the_layout(batch: Batch) -> None:
    labels = label_patches(batch.scenes, CANVAS)
    for index, scene in enumerate(batch.scenes):
        for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
            for patch in patches:
                assert labels.kind[index, patch] == 1
                assert labels.colour[index, patch] == thing.colour
                assert labels.shape[index, patch] == thing.shape
                digit = thing.digit if patch == patches[0] else -1
                assert labels.digit[index, patch] == digit
                assert labels.centre[index, patch] == int(patch == patches[0])
                for place, step in enumerate(NEIGHBOURS):
                    other = scene.layout.neighbour(thing, *step)
                    expected = [other.colour, other.shape] if other else [len(COLOURS), len(SHAPES)]
                    assert labels.near[index, patch, place].tolist() == expected
        for sign, patches in zip(scene.layout.signs, scene.sign_patches, strict=True):
            assert labels.digit[index, list(patches)].tolist() == list(sign.number)
            assert labels.slot[index, list(patches)].tolist() == list(range(len(sign.number)))
            assert set(labels.length[index, list(patches)].tolist()) == {len(sign.number) - 2}
            assert set(labels.shape[index, list(patches)].tolist()) == {UNLABELLED}


def test_patches_that_nothing_covers_are_background(batch: Batch) -> None:
    labels = label_patches(batch.scenes, CANVAS)
    background = labels.kind == 0

    for part in (labels.colour, labels.shape, labels.digit, labels.row, labels.slot, labels.centre):
        assert (part[background] == UNLABELLED).all()
    assert 0.4 < background.float().mean() < 0.95
