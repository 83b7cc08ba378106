"""Rows of an item: text between its tokens, and the positions that they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.serving.unit.samples import image, plan
from vllm_autoprune import Grid
from vllm_autoprune.serving.plan import LINE, MROPE
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.rows import KeptRows, decode_offsets, insert_text

pytestmark = pytest.mark.compat

WIDTH = 4
IMAGE = image(0, Grid(2, 3), WIDTH)
N = 6


def embed(ids: Tensor) -> Tensor:
    return ids[:, None].expand(-1, WIDTH).float()


def keep(indices: list[int], picture: ImageFeatures = IMAGE) -> KeptRows:
    numbers = torch.tensor(indices)
    return KeptRows(picture.rows()[numbers], numbers, numbers)


def test_positions_count_the_text_before_them() -> None:
    text = ((0, 7), (3, 8), (6, 9))
    (item,) = insert_text([keep([0, 3, 5])], [plan(3, text=text)], [IMAGE], embed)
    # whole: 7 | 0 1 2 | 8 | 3 4 5 | 9
    assert item.positions.tolist() == [0, 1, 4, 5, 7, 8]
    assert item.rows[[0, 2, 5], 0].tolist() == [7, 8, 9]
    assert torch.equal(item.rows[[1, 3, 4]], IMAGE.rows()[[0, 3, 5]])


def test_rows_of_one_place_stand_elsewhere() -> None:
    """A row without a token is the last of its region, and stands in the middle of the others."""
    picture_rows = IMAGE.rows()
    sort_keys = torch.tensor([0, 5, 5])
    item = KeptRows(picture_rows[:3], sort_keys, torch.tensor([0, 5, 2]))
    (item,) = insert_text([item], [plan(3, text=((3, 8),))], [IMAGE], embed)
    assert item.positions.tolist() == [0, 3, 6, 2]
    assert torch.equal(item.rows[[0, 2, 3]], picture_rows[:3])


def test_no_position_of_forged_text_is_beyond_its_item() -> None:
    text = ((4, 7), (1000, 8), (1000, 9))
    (item,) = insert_text([keep([1, 5])], [plan(2, text=text)], [IMAGE], embed)
    assert item.positions.tolist() == [1, 4, 6, 7, 8]


def test_text_has_no_channels_but_the_language_model_s() -> None:
    wide = image(0, Grid(2, 3), WIDTH + 2)
    item = keep([1, 5], wide)
    (item,) = insert_text([item], [plan(2, text=((2, 7),))], [wide], embed)
    assert item.rows[1].tolist() == [7.0] * WIDTH + [0.0] * 2


def test_packed_rows_lose_their_positions_and_cached_ones_do_not() -> None:
    """Under M-RoPE rows carry channels from the tower on, of which the cache has a copy."""
    (part,) = IMAGE.regions
    picture = ImageFeatures((replace(part, extra_channels=torch.ones(N, 6)),))
    item = KeptRows.keep_all(picture, N)
    rows = item.with_channels(MROPE, plan(N, positions="packed"), N)
    assert rows[:, WIDTH:].tolist() == [[-1.0] * 6] * N
    assert torch.equal(rows[:, :WIDTH], IMAGE.rows())
    assert torch.equal(picture.rows()[:, WIDTH:], torch.ones(N, 6))


def test_an_image_that_is_whole_carries_no_positions() -> None:
    item = KeptRows.keep_all(IMAGE, N)
    rows = item.with_channels(LINE, plan(N, tokens=N), N)
    _, is_set = decode_offsets([rows[:, WIDTH:]])
    assert not is_set.any()
