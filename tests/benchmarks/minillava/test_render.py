"""Rendering: deterministic by seed; labels match the drawn patches."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.minillava.layout import Canvas, draw_layout
from benchmarks.minillava.render import Batch, render, render_characters

CANVAS = Canvas()


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = random.Random(3)
    return render([draw_layout(rng, "signs", CANVAS) for _ in range(6)], CANVAS, 3)


def test_the_same_seed_gives_the_same_pixels(batch: Batch) -> None:
    layouts = [scene.layout for scene in batch.scenes]

    assert torch.equal(render(layouts, CANVAS, 3).images, batch.images)
    assert not torch.equal(render(layouts, CANVAS, 4).images, batch.images)


def test_a_larger_canvas_has_576_patches() -> None:
    canvas = Canvas(8)
    drawn = render([draw_layout(random.Random(1), "crowded", canvas)], canvas, 1)

    assert canvas.patches == 576
    assert drawn.images.shape == (1, 3, 336, 336)


def test_the_first_patch_of_a_shape_is_the_middle_of_its_cell(batch: Batch) -> None:
    for scene in batch.scenes:
        for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
            middle = (thing.row * 3 + 1) * CANVAS.grid + thing.column * 3 + 1
            assert patches[0] == middle
            assert {patch // CANVAS.grid // 3 for patch in patches} == {thing.row}
            assert {patch % CANVAS.grid // 3 for patch in patches} == {thing.column}


def test_shapes_are_painted_on_their_patches(batch: Batch) -> None:
    """The middle patch of every shape has more contrast than the typical background patch."""
    scene = batch.scenes[0]
    image = batch.images[0].float()
    tiles = image.view(3, 12, 14, 12, 14).permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
    spread = tiles.std(1)
    covered = [patches[0] for patches in scene.thing_patches]
    free = set(range(CANVAS.patches)) - {
        patch for patches in (*scene.thing_patches, *scene.sign_patches) for patch in patches
    }

    assert spread[covered].min() > spread[sorted(free)].median()


def test_a_character_image_has_a_digit_in_every_patch() -> None:
    images, digit, colour = render_characters(5, 2, CANVAS)

    assert images.shape == (2, 3, 168, 168)
    assert digit.shape == colour.shape == (2, 144)
    assert set(digit.unique().tolist()) == set(range(10))
