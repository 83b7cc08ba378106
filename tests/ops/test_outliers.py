from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_autoprune.ops.rowwise import find_outliers


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 144, 575, 576, 729])
def test_as_numpys_percentile_has_it(count: int) -> None:
    score = torch.rand(20, count, generator=torch.Generator().manual_seed(count)) ** 6
    actual = find_outliers(score)
    for row, mine in zip(score.numpy(), actual, strict=True):
        low, high = np.percentile(row, 25), np.percentile(row, 75)
        assert mine.tolist() == (row > high + 1.5 * (high - low)).tolist()


def test_a_constant_score_has_none_and_nan_is_none() -> None:
    assert not find_outliers(torch.ones(2, 9)).any()
    score = torch.ones(1, 9)
    score[0, 4] = torch.nan
    assert not find_outliers(score).any()
