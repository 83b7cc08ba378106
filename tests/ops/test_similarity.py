"""Cosines: their values, and bit-identical results alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.greedy import farthest_points
from vllm_autoprune.ops.similarity import (
    cosines,
    cosines_between,
    cosines_with,
    mean_of_largest_others,
    mean_of_neighbours,
)

HALF = [torch.float32, torch.bfloat16, torch.float16]


def rows(seed: int, batch: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, generator=source).to(dtype)


def cosine(features: Tensor) -> Tensor:
    return cosines(features, features.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 5, 255, 256, 300, 512, 577])
def test_cosines_are_products_of_directions_rounded_in_their_own_dtype(
    tokens: int, dtype: torch.dtype
) -> None:
    features = rows(tokens, 2, tokens, 33, dtype)
    unit = (features / features.norm(dim=-1, keepdim=True)).double()
    actual = cosine(features)
    assert actual.dtype == torch.float32 and actual.shape == (2, tokens, tokens)
    assert torch.allclose(actual.double(), unit @ unit.transpose(1, 2), atol=1e-5)


def test_the_two_triangles_are_equal_where_one_is_copied() -> None:
    actual = cosine(rows(1, 2, 576, 48, torch.float32))
    assert torch.allclose(actual, actual.transpose(1, 2), atol=1e-6)
    assert torch.equal(actual[:, :144, 144:], actual[:, 144:, :144].transpose(1, 2))


def test_cosine_with_a_zero_row_is_zero() -> None:
    features = rows(2, 1, 6, 8, torch.float16)
    features[0, 3] = 0
    actual = cosine(features)
    assert actual[0, 3].eq(0).all() and actual[0, :, 3].eq(0).all()


@pytest.mark.parametrize("dtype", HALF)
def test_cosines_between_subsets_are_entries_of_the_full_matrix(dtype: torch.dtype) -> None:
    features = rows(6, 2, 12, 33, dtype)
    features[0, 2] = 0
    actual = cosines_between(features[:, [2, 7]], features[:, [0, 2, 11]])
    assert torch.allclose(actual, cosine(features)[:, [2, 7]][:, :, [0, 2, 11]], atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_cosines_with_other_vectors(dtype: torch.dtype) -> None:
    # Wider than what fits the cache, so that there are several strips.
    tokens, width = 70, 4096
    features, others = rows(3, 2, tokens, width, dtype), rows(4, 2, 3, width, torch.float32)
    features[0, 5], others[1, 2] = 0, 0
    actual = cosines_with(features, others)
    wide, far = features.double(), others.double()
    wanted = torch.nn.functional.normalize(wide, dim=-1) @ torch.nn.functional.normalize(
        far, dim=-1
    ).transpose(1, 2)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("tokens", "width"), [(9, 16), (64, 100), (144, 64), (300, 48), (576, 96)])
def test_an_image_alone_has_the_same_bits_as_in_a_batch(
    tokens: int, width: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        features = rows(tokens, 5, tokens, width, torch.bfloat16)
        text = rows(5, 5, 2, width, torch.float32)
        together = selection(features, text)
        again = selection(features.clone(), text.clone())
        assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
        for image in range(5):
            one = slice(image, image + 1)
            alone = selection(features[one].clone(), text[one].clone())
            assert all(torch.equal(a[one], b) for a, b in zip(together, alone, strict=True))
    finally:
        torch.set_num_threads(before)


def selection(features: Tensor, text: Tensor) -> tuple[Tensor, ...]:
    """A selection with every operation that sums, whose rounding may depend on the batch."""
    similarity = cosine(features)
    relevance = cosines_with(features, text)
    quality = 1.5 + relevance.sum(dim=-1)
    count = features.shape[1] // 3
    picks = greedy_map(similarity, quality, count)
    nothing = torch.zeros_like(quality, dtype=torch.bool)
    far = farthest_points(1 - similarity, count, nearest=1 - similarity[:, 0], taken=nothing)
    return similarity, relevance, picks, far


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


def test_nan_outside_the_window_has_no_effect() -> None:
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
def test_means_of_an_image_have_the_same_bits_alone_and_in_a_batch(
    mean: Callable[[Tensor], Tensor],
) -> None:
    similarity = symmetric(2, 5, 64)
    for image in range(5):
        alone = similarity[image : image + 1].clone()
        assert torch.equal(mean(similarity)[image : image + 1], mean(alone))
