"""The renderer: seeded, and every evidence patch shows the object it is said to show."""

from __future__ import annotations

import torch

from benchmarks.minillava.scenes import (
    _RGB,
    CELL_PATCHES,
    EVALUATION_SEEDS,
    GRID,
    PATCH,
    PATCHES,
    TRAINING_SEEDS,
    draw,
    training_seed,
)


def test_one_seed_gives_one_picture_and_another_seed_another() -> None:
    first, again, other = draw(11, 3), draw(11, 3), draw(12, 3)

    assert torch.equal(first.images, again.images)
    assert first.scenes == again.scenes
    assert not torch.equal(first.images, other.images)
    assert first.scenes != other.scenes


def test_images_are_168_pixels_of_bytes() -> None:
    drawn = draw(0, 2)

    assert drawn.images.shape == (2, 3, 168, 168)
    assert drawn.images.dtype == torch.uint8


def test_names_and_digits_are_unique_within_a_scene() -> None:
    for scene in draw(3, 32).scenes:
        assert 4 <= len(scene.things) <= 8
        for values in zip(*((t.name, t.digit, t.cell) for t in scene.things), strict=True):
            assert len(set(values)) == len(values)


def test_every_patch_of_a_thing_shows_its_colour() -> None:
    drawn = draw(5, 8)
    palette = torch.tensor(_RGB).float()
    for image, scene in zip(drawn.images.float(), drawn.scenes, strict=True):
        tiles = image.view(3, GRID, PATCH, GRID, PATCH).permute(1, 3, 2, 4, 0)
        tiles = tiles.reshape(PATCHES, PATCH * PATCH, 3)
        for thing in scene.things:
            near = (tiles[list(thing.patches)] - palette[thing.colour]).norm(dim=-1) < 70
            assert bool((near.float().mean(1) >= 0.08).all()), thing


def test_things_own_their_patches_and_stay_in_their_cell() -> None:
    drawn = draw(6, 8)
    for owner, scene in zip(drawn.owner, drawn.scenes, strict=True):
        claimed = 0
        for place, thing in enumerate(scene.things):
            assert (owner == place).nonzero().flatten().tolist() == list(thing.patches)
            for patch in thing.patches:
                row, column = divmod(patch, GRID)
                assert row // CELL_PATCHES * 4 + column // CELL_PATCHES == thing.cell
            claimed += len(thing.patches)
        assert int((owner >= 0).sum()) == claimed


def test_training_never_draws_a_held_out_seed() -> None:
    corners = [
        training_seed(seed, stage, step, rank)
        for seed in (0, 7, 255, 2**31)
        for stage in (0, 1)
        for step in (0, 2**17 - 1)
        for rank in (0, 1)
    ]

    assert all(seed in TRAINING_SEEDS for seed in corners)
    assert len(set(corners[:8])) == 8
    # Disjoint also in the low 32 bits, all that torch's CPU generator keeps of a seed.
    assert TRAINING_SEEDS.stop <= EVALUATION_SEEDS.start < EVALUATION_SEEDS.stop <= 2**32
