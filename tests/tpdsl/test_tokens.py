from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tpdsl.samples import images, plain
from vllm_autoprune import (
    Grid,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)


def test_a_grid_counts_its_tokens() -> None:
    grid = Grid(24, 36, tiles=5)
    assert (grid.per_tile, grid.tokens) == (864, 4320)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(4, 8), r"features must be \(B, N, D\), got shape \(4, 8\)"),
        (torch.zeros(1, 5, 8), "features hold N = 5 tokens but the grid 2 x 2 x 1 tiles has 4"),
    ],
)
def test_features_must_fit_the_grid(features: torch.Tensor, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        VisualTokens(features, Grid(2, 2))


def test_signals_must_fit_the_features() -> None:
    with pytest.raises(SelectionError, match=r"cls_attention must start with \(B, N\) = \(2, 4\)"):
        VisualTokens(torch.zeros(2, 4, 8), Grid(2, 2), torch.zeros(2, 3))
    given = images().instruction
    assert given is not None
    with pytest.raises(SelectionError, match=r"instruction\.patches must start with"):
        VisualTokens(torch.zeros(2, 4, 8), Grid(2, 2), instruction=given)


def test_unit_rows_have_length_one_and_a_zero_row_stays_zero() -> None:
    unit = plain(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]])).unit
    assert unit.tolist() == [[[pytest.approx(0.6), pytest.approx(0.8)], [0, 0], [0, -1]]]


def test_half_precision_is_divided_before_it_is_widened() -> None:
    features = images(1, dtype=torch.float16).features
    divided = (features / features.norm(dim=-1, keepdim=True)).float()
    assert torch.equal(plain(features).unit, divided)
    widened = features.float() / features.float().norm(dim=-1, keepdim=True)
    assert not torch.equal(divided, widened)


def test_cosines_by_hand() -> None:
    tokens = plain(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [-5.0, 0.0]]), Grid(1, 2, 2))
    half = pytest.approx(0.5**0.5)
    assert tokens.cosine[0, 0].tolist() == [1, 0, half, -1]
    assert tokens.tile_cosine.shape == (2, 2, 2)
    assert tokens.tile_cosine[1, 0].tolist() == [pytest.approx(1), pytest.approx(-(0.5**0.5))]


def test_tile_and_image_views_share_their_rows() -> None:
    tokens = images(2, grid=Grid(2, 3, tiles=4))
    tiles = tokens.by_tile(tokens.features)
    assert tiles.shape == (8, 6, 16)
    assert torch.equal(tiles[5], tokens.features[1, 6:12])
    assert torch.equal(tokens.by_image(tiles), tokens.features)


def test_the_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        images().grid = Grid(1, 1)  # type: ignore[misc]


def test_precomputed_cosines_give_the_same_result() -> None:
    policy = materialize(load_state("autoprune"), 8)
    tokens = images(batch=3)
    result = tokens.cosine.clone()
    known = dataclasses.replace(tokens, known_cosine=result)
    assert known.cosine is result
    assert torch.equal(refine(policy, known).indices, refine(policy, tokens).indices)


def test_cosines_of_another_shape_are_refused() -> None:
    tokens = images()
    with pytest.raises(SelectionError, match="known_cosine"):
        dataclasses.replace(tokens, known_cosine=torch.zeros(1, 4, 4))
