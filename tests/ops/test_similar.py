from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_autoprune.ops.similarity import mean_of_largest_others, mean_of_neighbours


def symmetric(seed: int, batch: int, size: int, levels: int = 1000) -> Tensor:
    """Symmetric matrices with few enough values that many are equal."""
    source = torch.Generator().manual_seed(seed)
    half = torch.randint(-levels, levels, (batch, size, size), generator=source)
    return (half + half.transpose(1, 2)) / (2 * levels)


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 20),
    levels=st.sampled_from([2, 1000]),
    data=st.data(),
)
def test_the_largest_off_the_diagonal_by_sorting(
    seed: int, size: int, levels: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, size - 1))
    similarity = symmetric(seed, 2, size, levels)
    actual = mean_of_largest_others(similarity, count)
    for image, matrix in enumerate(similarity.tolist()):
        for row, values in enumerate(matrix):
            others = sorted(values[:row] + values[row + 1 :], reverse=True)[:count]
            assert actual[image, row].item() == pytest.approx(sum(others) / count, abs=1e-6)


@pytest.mark.parametrize("own", [-2.0, 0.5, 2.0])
def test_a_token_s_own_entry_never_counts(own: float) -> None:
    similarity = torch.tensor([[[own, 0.25, 0.75], [0.25, own, 0.5], [0.75, 0.5, own]]])
    assert mean_of_largest_others(similarity, 1).tolist() == [[0.75, 0.5, 0.75]]
    assert mean_of_largest_others(similarity, 2).tolist() == [[0.5, 0.375, 0.625]]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (4, 1), (3, 4), (6, 6)])
@pytest.mark.parametrize("radius", [1, 2, 3])
def test_neighbours_are_those_within_the_window(height: int, width: int, radius: int) -> None:
    size = height * width
    similarity = symmetric(height + 10 * width, 2, size)
    actual = mean_of_neighbours(similarity, height, width, radius)
    for token in range(size):
        near = [
            other
            for other in range(size)
            if other != token
            and abs(other // width - token // width) <= radius
            and abs(other % width - token % width) <= radius
        ]
        wanted = similarity[:, token, near].mean(dim=1) if near else torch.zeros(2)
        assert torch.allclose(actual[:, token], wanted, atol=1e-6)


def test_a_token_that_is_not_near_says_nothing_even_if_it_is_nan() -> None:
    similarity = symmetric(1, 1, 9)
    clean = mean_of_neighbours(similarity, 3, 3, 1)
    similarity[0, 0, 8] = torch.nan
    similarity[0, 8, 0] = torch.nan
    assert torch.equal(mean_of_neighbours(similarity, 3, 3, 1), clean)


MEANS: list[Callable[[Tensor], Tensor]] = [
    lambda similarity: mean_of_largest_others(similarity, 8),
    lambda similarity: mean_of_neighbours(similarity, 8, 8, 1),
]


@pytest.mark.parametrize("mean", MEANS, ids=["largest", "neighbours"])
def test_an_image_alone_has_the_same_bits_as_in_a_batch(mean: Callable[[Tensor], Tensor]) -> None:
    similarity = symmetric(2, 5, 64)
    for image in range(5):
        alone = similarity[image : image + 1].clone()
        assert torch.equal(mean(similarity)[image : image + 1], mean(alone))
