from __future__ import annotations

import pytest
import torch

from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.tpdsl.tokens import TileGroup, join_groups, join_tiles, tile_groups


def image_of(tiles: int, batch: int = 2) -> VisualTokens:
    """Tokens that hold their own number: 100 x image + index."""
    grid = Grid(2, 3, tiles)
    numbers = torch.arange(grid.tokens) + 100.0 * torch.arange(batch)[:, None]
    return VisualTokens(numbers[:, :, None], grid)


def test_nested_picks_interleave_by_rank_and_the_last_tiles_drop_their_last() -> None:
    picks = torch.tensor([[5, 0], [4, 1], [3, 2]])  # three tiles of one image
    actual = join_tiles(picks, image_of(3, batch=1), (2, 1, 1))
    assert actual.tolist() == [[5, 10, 15, 0]]


@pytest.mark.parametrize(
    ("budget", "groups"),
    [
        (6, [(0, 3, 2)]),
        (7, [(0, 1, 3), (1, 2, 2)]),
        (2, [(0, 2, 1)]),
        (18, [(0, 3, 6)]),
    ],
)
def test_tiles_of_equal_share_are_a_group(budget: int, groups: list[tuple[int, int, int]]) -> None:
    actual = tile_groups(image_of(3), budget)
    assert [(group.first, group.tiles, group.share) for group in actual] == groups


def test_a_group_sees_its_own_tiles_of_every_image() -> None:
    tokens = image_of(3)
    group = TileGroup(first=1, tiles=2, share=1)
    actual = group.of(tokens.features, tokens)[:, :, 0]
    assert actual[:, 0].tolist() == [6, 12, 106, 112] and actual.shape == (4, 6)
    within = torch.tensor([[0], [5], [1], [2]])
    assert group.within_image(within, tokens).tolist() == [[6], [17], [7], [14]]


def test_groups_are_joined_by_rank_with_surplus_rows_last() -> None:
    tokens = image_of(3)
    groups = tile_groups(tokens, 4)
    first = torch.tensor([[0, 1], [100, 101]])  # one tile of each image, two rows
    others = torch.tensor([[10], [20], [110], [120]])  # two tiles of each image, one row
    actual = join_groups([first, others], groups, tokens)
    assert actual.tolist() == [[0, 10, 20, 1], [100, 110, 120, 101]]
    deep = join_groups([first[:, :, None], others[:, :, None]], groups, tokens)
    assert deep.tolist() == actual[:, :, None].tolist()
    assert join_groups([others], [TileGroup(0, 2, 1)], tokens).tolist() == [[10, 20], [110, 120]]
