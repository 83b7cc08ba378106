"""Average pooling: exactly K cells that cover the grid, every token with the same weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.tpdsl.refine import pool_tokens, split_into_bands


def tokens_of(grid: Grid, width: int = 3, batch: int = 1) -> VisualTokens:
    generator = torch.Generator().manual_seed(grid.tokens)
    return VisualTokens(torch.randn(batch, grid.tokens, width, generator=generator), grid)


def test_a_fourth_of_a_square_is_the_mean_of_each_two_by_two() -> None:
    grid = Grid(6, 6)
    tokens = tokens_of(grid)
    pooled = pool_tokens(9, tokens)
    square = tokens.features[0].view(3, 2, 3, 2, 3)
    assert torch.allclose(pooled.features[0], square.mean(dim=(1, 3)).flatten(0, 1), atol=1e-6)
    # The token at the centre of a cell, or after it where there is none.
    assert pooled.indices[0].tolist() == [7, 9, 11, 19, 21, 23, 31, 33, 35]


def test_tokens_on_a_border_count_by_area() -> None:
    grid = Grid(1, 3)
    tokens = VisualTokens(torch.tensor([[[3.0], [6.0], [9.0]]]), grid)
    # Each cell is one and a half tokens wide.
    assert pool_tokens(2, tokens).features.flatten().tolist() == pytest.approx([4.0, 8.0])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.data())
def test_any_number_of_cells_is_met_exactly(
    height: int, width: int, tiles: int, data: st.DataObject
) -> None:
    grid = Grid(height, width, tiles)
    budget = data.draw(st.integers(1, grid.tokens))
    ones = VisualTokens(torch.ones(2, grid.tokens, 1), grid)
    pooled = pool_tokens(budget, ones)
    assert pooled.features.shape == (2, budget, 1)
    assert torch.allclose(pooled.features, torch.ones(2, budget, 1), atol=1e-5)
    assert (pooled.indices.diff(dim=1) > 0).all(), "centres are unique, in raster order"
    assert ((pooled.indices >= 0) & (pooled.indices < grid.tokens)).all()


@pytest.mark.parametrize(("budget", "bands"), [(64, (8,) * 8), (16, (4,) * 4), (8, (3, 3, 2))])
def test_cells_are_about_as_high_as_wide(budget: int, bands: tuple[int, ...]) -> None:
    assert split_into_bands(budget, 12, 12) == bands


def test_every_token_weighs_the_same_where_cells_are_equal() -> None:
    tokens = tokens_of(Grid(5, 7))
    pooled = pool_tokens(6, tokens)  # 2 x 3 cells
    assert torch.allclose(pooled.features.mean(dim=1), tokens.features.mean(dim=1), atol=1e-6)


def test_the_share_of_each_tile_comes_from_that_tile() -> None:
    grid = Grid(2, 2, 3)
    numbered = torch.arange(3.0).repeat_interleave(4)[None, :, None]
    pooled = pool_tokens(4, VisualTokens(numbered, grid))
    assert pooled.features.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]


def test_an_image_alone_has_the_bits_it_has_in_a_batch() -> None:
    tokens = tokens_of(Grid(24, 24), 64, batch=3)
    together = pool_tokens(50, tokens).features
    for i in range(3):
        alone = VisualTokens(tokens.features[i : i + 1].clone(), tokens.grid)
        assert torch.equal(pool_tokens(50, alone).features[0], together[i])


def test_what_is_not_finite_does_not_spread() -> None:
    tokens = tokens_of(Grid(4, 4))
    broken = tokens.features.clone()
    broken[0, 0] = torch.nan
    pooled = pool_tokens(4, VisualTokens(broken, tokens.grid)).features
    assert pooled.isfinite().all()
    assert torch.equal(pooled[0, 1:], pool_tokens(4, tokens).features[0, 1:])


def test_all_tokens_stay_as_they_are() -> None:
    tokens = tokens_of(Grid(3, 3))
    assert torch.equal(pool_tokens(9, tokens).features, tokens.features)
    assert torch.equal(pool_tokens(10, tokens).features, tokens.features)
