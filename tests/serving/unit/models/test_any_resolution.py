"""Rows of any-resolution images, and which of them are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import served
from vllm_autoprune.serving.models.any_resolution import (
    Join,
    compute_joined_layout,
    join_features,
    split_joined_images,
)
from vllm_autoprune.serving.models.vision import Tiles
from vllm_autoprune.serving.shared.plan import ItemPlan
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.region_selection import ModelParts, SelectionContext
from vllm_autoprune.tpdsl.tokens import Grid

SIDE, SIZE = 4, 16
STATE = {"/base_policy": {"name": "divprune"}, "/constraints/selector/q_e": 0}


def join_of(rows: int, columns: int, cut: int = 0) -> Join:
    """LLaVA-NeXT's order: base view, then the stitched map without ``cut`` rows at both ends."""

    def join(tiles: Tensor, newline: Tensor) -> Tensor:
        base, crops = tiles[0], tiles[1 : 1 + rows * columns]
        stitched = crops.reshape(rows, columns, SIDE, SIDE, -1).permute(0, 2, 1, 3, 4)
        whole = stitched.reshape(rows * SIDE, columns * SIDE, -1)
        whole = whole[cut : len(whole) - cut]
        ends = newline.expand(len(whole), 1, -1)
        return torch.cat([base, torch.cat([whole, ends], dim=1).flatten(0, 1)])

    return join


def image(join: Join, tiles: int, width: int = 8, blank: int = 0) -> tuple[Tensor, ImageFeatures]:
    """Random tiles: the rows of the stock model, and the joined features.

    ``blank`` tiles stand behind them, as where a larger image was processed in the same call.
    """
    source = torch.Generator().manual_seed(tiles)
    projected = torch.randn(tiles, SIZE, width, generator=source)
    attention = projected[:, :, 0].exp()
    newline = torch.full((width,), 9.0)
    padded = Tiles(
        nn.functional.pad(projected, (0, 0, 0, 0, 0, blank)),
        nn.functional.pad(attention, (0, 0, 0, blank)),
    )
    inputs = {"image_sizes": torch.tensor([SIDE, SIDE * (tiles - 1)])}
    joined = join_features(padded, inputs, lambda _: join, newline, config_of(tiles))
    return join(projected, newline), joined


def config_of(tiles: int) -> Any:
    """Of a model that cuts every image into so many tiles, the base view among them."""
    return SimpleNamespace(
        image_grid_pinpoints=[[SIDE, SIDE * (tiles - 1)]],
        vision_config=SimpleNamespace(image_size=SIDE, patch_size=1),
    )


def test_without_padding_base_view_and_crops_are_equal_tiles() -> None:
    join = join_of(2, 2)
    (place,) = compute_joined_layout(join, 5, SIDE).places
    assert (place.grid, place.share) == (Grid(SIDE, SIDE, 5), 5)
    rows, joined = image(join, 5)
    assert (joined.tokens, joined.candidates, joined.gaps) == (len(rows), 80, 8)
    assert torch.equal(joined.rows(), rows)
    source = torch.Generator().manual_seed(5)
    tiles = torch.randn(5, SIZE, 8, generator=source)
    assert torch.equal(joined.regions[0].projected, tiles.flatten(0, 1)), "tile after tile"


def test_where_padding_was_cut_off_crops_are_one_region() -> None:
    join = join_of(2, 2, cut=1)
    base, crops = compute_joined_layout(join, 5, SIDE).places
    assert (base.grid, base.share) == (Grid(SIDE, SIDE), 1)
    assert (crops.grid, crops.share) == (Grid(6, 8), 4)
    rows, joined = image(join, 5)
    assert torch.equal(joined.rows(), rows)
    for region in joined.regions:
        assert region.cls_attention is not None
        assert torch.equal(region.cls_attention, region.projected[:, 0].exp())


@pytest.mark.parametrize("cut", [0, 1])
def test_blank_tiles_of_a_batch_change_nothing(cut: int) -> None:
    """As the model cuts them off: neither layout nor shares of the budget count them."""
    join = join_of(2, 2, cut)
    (_, alone), (_, padded) = image(join, 5), image(join, 5, blank=4)
    assert torch.equal(padded.rows(), alone.rows())
    for region, own in zip(padded.regions, alone.regions, strict=True):
        assert (region.grid, region.share) == (own.grid, own.share)
        assert region.cls_attention is not None and own.cls_attention is not None
        assert torch.equal(region.cls_attention, own.cls_attention)
    tiles = torch.zeros(1, 9, 3, SIDE, SIDE)
    inputs = {"pixel_values": tiles, "image_sizes": torch.tensor([[SIDE, 4 * SIDE]])}
    (split,) = split_joined_images(inputs, lambda _: join, config_of(5))
    assert split.tokens == alone.tokens


def _pruned(joined: ImageFeatures, budget: int) -> Tensor:
    reporter = FallbackReporter()
    state = served(STATE)
    parts = ModelParts(lambda rows: rows)
    (rows,) = prune_images(
        SelectionContext(state, parts, reporter), [ItemPlan(budget, (1, 1))], [joined]
    )
    assert reporter.meter.errors == {}
    return rows


def _places(rows: Tensor, whole: Tensor) -> list[int]:
    same = (rows[:, None] == whole[None]).all(dim=2)
    assert bool(same.any(dim=1).all())
    return [int(i) for i in same.long().argmax(dim=1)]


def test_kept_rows_come_in_the_model_s_own_order_without_newlines() -> None:
    for join, tiles in ((join_of(2, 2), 5), (join_of(1, 3, cut=1), 4), (join_of(3, 1), 4)):
        rows, joined = image(join, tiles)
        kept = _places(_pruned(joined, 9), rows)
        assert len(kept) == 9
        assert kept == sorted(set(kept))
        assert not any(bool((rows[i] == 9.0).all()) for i in kept)


def test_budget_is_split_over_tiles() -> None:
    _, joined = image(join_of(2, 2), 5)
    whole = joined.regions[0].projected
    kept = _places(_pruned(joined, 10), whole)
    assert [sum(i // SIZE == tile for i in kept) for tile in range(5)] == [2] * 5
    rows, cut = image(join_of(2, 2, cut=1), 5)
    kept = _places(_pruned(cut, 10), rows)
    assert sum(i < SIZE for i in kept) == 2


def test_newlines_fill_rows_beyond_the_tokens() -> None:
    rows, joined = image(join_of(2, 2, cut=1), 5)
    newlines = int((rows == 9.0).all(dim=1).sum())
    assert joined.gaps == newlines == 6
    some = _pruned(joined, joined.candidates + 2)
    is_newline = (rows == 9.0).all(dim=1)
    first_two = is_newline & (is_newline.cumsum(0) <= 2)
    assert torch.equal(some, rows[~is_newline | first_two])
    assert torch.equal(_pruned(joined, joined.tokens), rows)
