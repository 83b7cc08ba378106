"""Which tile of an image a region shows, where `explain` draws one sheet a region."""

from __future__ import annotations

import dataclasses

import torch

from tests.serving.unit.samples import image
from vllm_autoprune.checkpoints.engine import find_tiles_of_regions
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
