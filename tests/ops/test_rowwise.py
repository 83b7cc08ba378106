from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.ops.rowwise import (
    TIE,
    argmax_within,
    evenly_spaced,
    find_outliers,
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    min_max_normalise,
    rank_descending,
)


def test_normalise_by_hand() -> None:
    score = torch.tensor([[2.0, 4.0, 3.0], [-1.0, 0.0, 9.0]])
    assert min_max_normalise(score).tolist() == [[0, 1, 0.5], [0, pytest.approx(0.1), 1]]


def test_the_offset_is_in_the_numerator_only() -> None:
    assert min_max_normalise(torch.tensor([0.0, 4.0]), offset=1.0).tolist() == [0.25, 1.25]


def test_a_constant_score_becomes_ones() -> None:
    assert min_max_normalise(torch.tensor([[0.3, 0.3], [-7.0, -7.0]]), 1e-6).tolist() == [
        [1, 1],
        [1, 1],
    ]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_values_within_the_tolerance_of_the_maximum_are_a_tie(size: float) -> None:
    rounded, apart = 1 - TIE / 4, 1 - 4 * TIE
    values = torch.tensor([[0.0, rounded, 1.0, rounded], [apart, 0.5, 0.5, 1.0]])
    assert argmax_within(values)[0].tolist() == [1, 3]
    assert argmax_within(values * size, relative=True)[0].tolist() == [1, 3]
    lower = torch.tensor([[-torch.inf, -2.0, torch.inf, 1.0], [-3.0, -2.0, -torch.inf, -2.0]])
    assert argmax_within(lower, relative=True)[0].tolist() == [2, 1]


def test_nan_does_not_look_constant() -> None:
    assert min_max_normalise(torch.tensor([0.0, torch.nan, 1.0])).isnan().any()


def test_ranking_is_descending_and_ties_go_to_the_lower_index() -> None:
    assert rank_descending(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])).tolist() == [[1, 2, 4, 3, 0]]


@given(st.sets(st.integers(0, 19), min_size=1))
def test_indices_from_mask_inverts_mask_from_indices(positions: set[int]) -> None:
    mask = mask_from_indices(torch.tensor([sorted(positions, reverse=True)]), 20)
    assert mask.sum() == len(positions)
    assert indices_from_mask(mask, len(positions)).tolist() == [sorted(positions)]


@given(tokens=st.integers(1, 3000), data=st.data())
def test_an_even_spread_has_equal_gaps_and_equal_margins(tokens: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, tokens))
    places = evenly_spaced(2, tokens, count, torch.device("cpu"))
    assert places.shape == (2, count) and torch.equal(places[0], places[1])
    row = places[0].tolist()
    assert row == sorted(set(row)) and row[0] >= 0 and row[-1] < tokens
    gaps = [b - a for a, b in itertools.pairwise(row)]
    assert all(gap in (tokens // count, tokens // count + 1) for gap in gaps)
    assert abs(row[0] - (tokens - 1 - row[-1])) <= 1 + tokens // count


def test_gather_reads_each_image_at_its_own_indices() -> None:
    values = torch.arange(2 * 4 * 3).view(2, 4, 3)
    actual = gather_rows(values, torch.tensor([[3, 0], [1, 1]]))
    assert actual.tolist() == [[[9, 10, 11], [0, 1, 2]], [[15, 16, 17], [15, 16, 17]]]


def test_views_that_are_not_contiguous_and_empty_selections() -> None:
    values = torch.rand(2, 3, 4).transpose(1, 2)
    at = torch.tensor([[2], [3]])
    assert torch.equal(gather_rows(values, at)[:, 0], values[torch.arange(2), at[:, 0]])
    assert gather_rows(values, at[:, :0]).shape == (2, 0, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 144, 575, 576, 729])
def test_outliers_use_the_quartiles_of_numpy_percentile(count: int) -> None:
    score = torch.rand(20, count, generator=torch.Generator().manual_seed(count)) ** 6
    actual = find_outliers(score)
    for row, mine in zip(score.numpy(), actual, strict=True):
        low, high = np.percentile(row, 25), np.percentile(row, 75)
        assert mine.tolist() == (row > high + 1.5 * (high - low)).tolist()


def test_constant_scores_and_nan_are_no_outliers() -> None:
    assert not find_outliers(torch.ones(2, 9)).any()
    score = torch.ones(1, 9)
    score[0, 4] = torch.nan
    assert not find_outliers(score).any()
