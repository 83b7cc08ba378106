from __future__ import annotations

import pytest
import torch

from vllm_autoprune.ops.similarity import (
    map_weight,
    mean_dissimilarity,
    scale_to_unit_variance,
    subtract_mean,
)


def test_the_mean_of_each_image_is_taken_out() -> None:
    rows = torch.tensor([[[1.0, 4.0], [3.0, 0.0]], [[5.0, 5.0], [5.0, 5.0]]])
    assert subtract_mean(rows).tolist() == [[[-1, 2], [1, -2]], [[0, 0], [0, 0]]]


def test_channels_are_scaled_to_unit_variance_and_keep_their_mean() -> None:
    rows = torch.tensor([[[10.0, 7.0], [30.0, 7.0]]])
    # Deviations 10 and 0: the constant channel is divided by the square root of 1e-6.
    scaled = scale_to_unit_variance(rows)
    assert scaled[0].tolist() == [
        pytest.approx([1, 7000], rel=1e-4),
        pytest.approx([3, 7000], rel=1e-4),
    ]


def test_mean_dissimilarity_leaves_the_token_itself_out() -> None:
    rows = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]])
    # Cosines 0 and -1; 0 and 0; -1 and 0.
    assert mean_dissimilarity(rows)[0].tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_tokens_that_are_alike_weigh_one() -> None:
    rows = torch.randn(1, 1, 4096, generator=torch.Generator().manual_seed(2)).expand(1, 577, -1)
    for kind in ("none", "minmax", "sigmoid"):
        assert map_weight(mean_dissimilarity(rows), kind).tolist() == [[1.0] * 577]


def test_weights_reach_from_zero_to_one() -> None:
    score = torch.tensor([[0.5, 0.25, 0.0]])
    assert map_weight(score, "minmax")[0].tolist() == pytest.approx([1, 0.5, 0], abs=1e-5)
    assert map_weight(score, "sigmoid")[0].tolist() == pytest.approx(
        [0.7729, 0.5, 0.2271], abs=1e-3
    )
    assert map_weight(score, "none").tolist() == [[1, 1, 1]]
