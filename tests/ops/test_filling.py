from __future__ import annotations

import torch

from vllm_autoprune.ops.greedy import fill_by_weight

PICKS = torch.tensor([[3, 1, 0]])
WEIGHT = torch.tensor([[0.2, 0.9, 0.5, 0.1, 0.5]])


def test_picks_with_a_gain_stay_and_the_rest_comes_by_weight() -> None:
    gains = torch.tensor([[2.0, 1.0, 0.5]])
    assert fill_by_weight(PICKS, gains, WEIGHT, None, 0.1).tolist() == [[3, 1, 0]]
    assert fill_by_weight(PICKS, gains, WEIGHT, None, 0.7).tolist() == [[3, 1, 2]]
    assert fill_by_weight(PICKS, gains, WEIGHT, None, 5.0).tolist() == [[1, 2, 4]]


def test_tokens_that_are_not_eligible_never_fill() -> None:
    eligible = torch.tensor([[True, False, False, True, True]])
    gains = torch.zeros(1, 3)
    assert fill_by_weight(PICKS, gains, WEIGHT, eligible, 0.0).tolist() == [[4, 0, 3]]


def test_nan_is_no_gain_and_a_nan_weight_comes_first() -> None:
    gains = torch.tensor([[1.0, torch.nan, torch.nan]])
    weight = torch.tensor([[torch.nan, 0.9, -torch.inf, 0.1, 0.5]])
    assert fill_by_weight(PICKS, gains, weight, None, 0.0).tolist() == [[3, 0, 1]]
