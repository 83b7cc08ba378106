from __future__ import annotations

import math

import pytest
import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, plain
from vllm_autoprune.tpdsl.atoms.kernels import run_kernel, sharpen

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
