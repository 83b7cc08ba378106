from __future__ import annotations

import torch

from vllm_autoprune.ops.rowwise import gather_rows


def test_every_image_is_read_at_its_own_places() -> None:
    values = torch.arange(2 * 4 * 3).view(2, 4, 3)
    actual = gather_rows(values, torch.tensor([[3, 0], [1, 1]]))
    assert actual.tolist() == [[[9, 10, 11], [0, 1, 2]], [[15, 16, 17], [15, 16, 17]]]


def test_views_that_are_not_contiguous_and_empty_selections() -> None:
    values = torch.rand(2, 3, 4).transpose(1, 2)
    at = torch.tensor([[2], [3]])
    assert torch.equal(gather_rows(values, at)[:, 0], values[torch.arange(2), at[:, 0]])
    assert gather_rows(values, at[:, :0]).shape == (2, 0, 3)
