from __future__ import annotations

import math

import pytest
import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, plain
from vllm_autoprune import Grid
from vllm_autoprune.tpdsl.atoms.scoring import run_kernel, sharpen

TOKENS = plain(torch.tensor([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0]]))
G = torch.tensor([[0.1, 0.3, 0.5]])


def approx(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=1e-6) for row in rows]


@means("pairwise_cosine_kernel")
def test_cosine_kernel_ignores_quality() -> None:
    kernel = run_kernel(call("pairwise_cosine_kernel"), TOKENS, G)
    assert kernel.similarity[0].tolist() == approx([[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]])
    assert kernel.quality.tolist() == [[1, 1, 1]]


def test_opposite_tokens_may_count_as_unrelated() -> None:
    kernel = run_kernel(call("pairwise_cosine_kernel", clamp_negative=True), TOKENS, G)
    assert kernel.similarity[0].tolist() == approx([[1, 0.6, 0], [0.6, 1, 0], [0, 0, 1]])


@means("runtime_conditional_similarity_kernel")
def test_the_conditional_kernel_scales_by_normalised_quality() -> None:
    kernel = run_kernel(call("runtime_conditional_similarity_kernel", eps=1e-3), TOKENS, G)
    assert torch.equal(kernel.similarity, TOKENS.cosine)
    assert kernel.quality[0].tolist() == pytest.approx([0.0025, 0.5025, 1.0025], rel=1e-4)


def test_theta_is_the_exponential_balance() -> None:
    kernel = run_kernel(call("runtime_conditional_similarity_kernel", theta=0.8), TOKENS, G)
    # alpha = 0.8 / (2 * 0.2) = 2
    assert kernel.quality[0].tolist() == pytest.approx([1, math.e, math.e**2], rel=1e-4)


def test_theta_none_differs_from_theta_zero() -> None:
    r = torch.tensor([0.2, 0.9])
    assert sharpen(r, None) is r
    assert sharpen(r, 0.0).tolist() == [1.0, 1.0]


@means("centred_cosine_kernel")
def test_the_centred_kernel_compares_what_tokens_do_not_share() -> None:
    """The mean token is (2, 4): less it, two tokens are opposite and one stands across them."""
    tokens = plain(torch.tensor([[1.0, 4.0], [3.0, 4.0], [2.0, 7.0], [2.0, 1.0]]))
    kernel = run_kernel(call("centred_cosine_kernel"), tokens, torch.rand(1, 4))
    expected = [[1.0, -1, 0, 0], [-1.0, 1, 0, 0], [0.0, 0, 1, -1], [0.0, 0, -1, 1]]
    assert kernel.similarity[0].tolist() == approx(expected)
    assert kernel.quality.tolist() == [[1, 1, 1, 1]]


def test_each_tile_has_a_mean_of_its_own() -> None:
    features = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 9.0]]])
    tokens = plain(features, Grid(1, 2, tiles=2))
    kernel = run_kernel(call("centred_cosine_kernel"), tokens, torch.ones(1, 4))
    expected = [[1.0, -1, 0, 0], [-1.0, 1, 0, 0], [0.0, 0, 1, -1], [0.0, 0, -1, 1]]
    assert kernel.similarity[0].tolist() == approx(expected)


def test_scaled_variance_lets_no_channel_dominate() -> None:
    """By the first channel alone the tokens are two pairs; scaled, both channels count alike."""
    tokens = plain(torch.tensor([[1e3, 1.0], [1e3, -1.0], [-1e3, 1.0], [-1e3, -1.0]]))
    flat, scaled = (
        run_kernel(call("centred_cosine_kernel", scale_variance=on), tokens, torch.ones(1, 4))
        for on in (False, True)
    )
    assert flat.similarity[0, 0].tolist() == pytest.approx([1, 1, -1, -1], abs=1e-4)
    assert scaled.similarity[0, 0].tolist() == pytest.approx([1, 0, 0, -1], abs=1e-4)


def test_the_centred_kernel_may_be_scaled_by_quality() -> None:
    kernel = run_kernel(call("centred_cosine_kernel", weighted=True), TOKENS, G)
    assert kernel.quality[0].tolist() == pytest.approx([0, 0.5, 1], abs=1e-4)
