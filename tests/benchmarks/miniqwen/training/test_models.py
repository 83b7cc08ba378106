"""Batches of images of one size give the states of the model's own vision tower."""

from __future__ import annotations

import pytest
import torch

from benchmarks.miniqwen.sizes import MERGE, Size
from benchmarks.miniqwen.training.models import build_model, merge_states, tower_states
from benchmarks.miniqwen.training.pictures import View, draw_pictures
from benchmarks.miniqwen.vocabulary import language_tokenizer


@pytest.mark.parametrize("seen", [Size(6, 9), Size(4, 6)])
def test_batched_states_are_those_of_transformers(seen: Size) -> None:
    torch.manual_seed(0)
    tower = build_model(language_tokenizer()).model.visual
    patches = draw_pictures(3, 1, 1, View(Size(6, 9), seen)).patches.float()
    frames = patches.flatten(0, 2).unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1).flatten(1)
    grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]] * 2)
    with torch.no_grad():
        rows, levels = merge_states(tower, tower_states(tower, patches, seen))
        own = tower(frames, grid_thw=grid)
    torch.testing.assert_close(rows.flatten(0, 1), own.pooler_output, atol=1e-4, rtol=1e-4)
    assert len(levels) == len(own.deepstack_features) == 2
    for level, expected in zip(levels, own.deepstack_features, strict=True):
        torch.testing.assert_close(level.flatten(0, 1), expected, atol=1e-4, rtol=1e-4)
