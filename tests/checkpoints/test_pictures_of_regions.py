"""What a region of an image shows, of which `explain` draws a sheet."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch

from tests.serving.unit.samples import image
from vllm_autoprune.checkpoints.engine import find_tiles_of_regions, restore_picture
from vllm_autoprune.serving.worker.features import ImageFeatures

TILES = tuple(image(seed).regions[0] for seed in range(3))


def test_regions_are_the_tiles_that_keep_tokens() -> None:
    whole_image_last = ImageFeatures(TILES, first=-1)
    assert find_tiles_of_regions(whole_image_last, 3, 5) == [0, 1, 2]
    assert find_tiles_of_regions(whole_image_last, 3, 2) == [0, 2]
    assert find_tiles_of_regions(whole_image_last, 3, 1) == [2]


def test_other_regions_are_not_tiles() -> None:
    """A base view and stitched crops, one grid, several tiles in one region."""
    stitched = dataclasses.replace(TILES[1], order=torch.arange(36))
    base = dataclasses.replace(TILES[0], order=torch.arange(36))
    assert find_tiles_of_regions(ImageFeatures((base, stitched)), 2, 5) == []
    assert find_tiles_of_regions(ImageFeatures(TILES[:1]), 1, 5) == []
    assert find_tiles_of_regions(ImageFeatures(TILES[:1]), 4, 5) == []


def test_pixels_come_back_as_they_were() -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    levels = torch.randint(256, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    shift, scale = (torch.tensor(x)[:, None, None] for x in (mean, std))
    normalised = SimpleNamespace(image_mean=mean, image_std=std)
    picture = restore_picture((levels / 255 - shift) / scale, normalised)
    assert picture.size == (4, 5)
    assert picture.getpixel((3, 1)) == tuple(levels[:, 1, 3].tolist())
