"""Rows of an image with text between its tiles: each tile has as many as it has placeholders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.serving.unit.batches import N, plan, pruned
from tests.serving.unit.samples import image, rows_of, served
from vllm_autoprune import VisualTokens
from vllm_autoprune.serving.shared.part_shares import split_over_parts
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.tpdsl.executor.pooling import pool_tokens

BY_QUALITY: dict[str, object] = {
    "/reassembly": {"atom": "reassemble/nearest.mean.residual.score", "strength": 0.0}
}
"""Rows in the order of their quality, whatever their places."""


def test_the_remainder_goes_to_the_tile_that_shows_the_whole_image() -> None:
    assert split_over_parts(5, [9] * 3, [1] * 3, first=-1) == (2, 1, 2)
    assert split_over_parts(1, [9] * 3, [1] * 3, first=-1) == (0, 0, 1)
    assert split_over_parts(26, [9] * 3, [1] * 3, first=-1) == (9, 8, 9)
    assert split_over_parts(40, [9] * 3, [1] * 3, first=-1) == (9, 9, 9)


@pytest.mark.parametrize("budget", [1, 2, 5, 3 * N - 1])
@pytest.mark.parametrize(
    ("keep", "changes"),
    [("state", {}), ("state", BY_QUALITY), ("random", {}), ("reference", {})],
    ids=["state", "by quality", "random", "reference"],
)
def test_rows_stand_in_their_tile(budget: int, keep: Any, changes: dict[str, object]) -> None:
    tiles = tuple(image(seed).regions[0] for seed in range(3))
    whole = ImageFeatures(tiles, first=-1)
    (rows,) = pruned([plan(budget, key=3, keep=keep)], [whole], served(changes))
    expected = split_over_parts(budget, [N] * 3, [1] * 3, first=-1)
    assert [row // N for row in rows_of(whole, rows)] == [
        tile for tile, count in enumerate(expected) for _ in range(count)
    ]


def test_each_tile_is_pooled_to_its_share() -> None:
    tiles = tuple(image(seed).regions[0] for seed in range(3))
    whole = ImageFeatures(tiles, first=-1)
    (rows,) = pruned([plan(8, key=3, keep="resized")], [whole], served())
    expected = [
        pool_tokens(count, VisualTokens(tile.projected[None], tile.grid)).features[0]
        for tile, count in zip(tiles, (3, 2, 3), strict=True)
    ]
    assert torch.equal(rows, torch.cat(expected))
