"""Sizes are those that the processor gives an image with a budget of pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from benchmarks.miniqwen.sizes import MERGE, SIZES, TOKEN, UNSEEN_SIZES, Size, shrink_size


@pytest.mark.parametrize("size", [*SIZES, *UNSEEN_SIZES])
@pytest.mark.parametrize("divisor", [2, 4, 8, 16])
def test_shrunken_sizes_are_those_of_the_processor(
    checkpoint: Path, size: Size, divisor: int
) -> None:
    budget = size.tokens // divisor
    shrunk = shrink_size(size, budget)
    assert shrunk.tokens <= budget
    processor = AutoProcessor.from_pretrained(checkpoint).image_processor
    limits = {"shortest_edge": TOKEN * TOKEN, "longest_edge": budget * TOKEN * TOKEN}
    image = torch.zeros(3, size.height, size.width, dtype=torch.uint8)
    grid = processor(image, size=limits, return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, shrunk.rows * MERGE, shrunk.columns * MERGE]]


def test_sizes_of_training_and_of_the_test_split_differ() -> None:
    assert not set(SIZES) & set(UNSEEN_SIZES)
