from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, native, select
from vllm_autoprune import Grid, Instruction, SelectionError, VisualTokens
from vllm_autoprune.tpdsl.tokens import TowerStates


def image_of(dots: list[float], tiles: int = 1, sign: int = -1) -> VisualTokens:
    """One image whose tokens have these dot products with the text; patches are one-hot."""
    count = len(dots)
    patches = torch.tensor(dots)[None, :, None] * torch.tensor([2.0, 0.0])
    text = torch.tensor([[[0.5, 9.0]]])
    used = torch.ones(1, 1, dtype=torch.bool)
    hidden = torch.eye(count)[None]
    return VisualTokens(
        hidden,
        Grid(1, count // tiles, tiles),
        instruction=Instruction(patches, text, used, sign),
        tower=TowerStates(hidden, hidden, project=lambda rows: 2 * rows),
    )


DOTS = [0.5, -3.0, 2.0, -0.1, 7.0, -1.0]


def test_the_lowest_dot_products_win_with_clip_and_the_mean_of_the_rest_follows() -> None:
    actual = select("trim", image_of(DOTS), 4)
    assert actual.picks.tolist() == [[1, 5, 3]]
    assert actual.extra is not None
    third = pytest.approx(2 / 3)  # projected by a factor of two
    assert actual.extra[0, 0].tolist() == [third, 0, third, 0, third, 0]


def test_the_sign_turns_the_order_around() -> None:
    assert select("trim", image_of(DOTS, sign=1), 4).picks.tolist() == [[4, 2, 0]]


def test_neither_side_is_normalised() -> None:
    # By cosine these are alike; by dot product the longer one is first.
    assert select("trim", image_of([-1.0, -2.0, 3.0]), 2).picks.tolist() == [[1]]


def test_kept_rows_stay_as_they_are() -> None:
    tokens = images(1)
    actual = select("trim", tokens, 6)
    where = actual.picks[:, :, None].expand(-1, -1, tokens.features.shape[2])
    assert torch.equal(actual.rows(tokens), tokens.features)
    assert actual.merged is not None
    assert torch.equal(actual.merged, tokens.features.gather(1, where))


def test_a_single_row_is_a_patch() -> None:
    actual = select("trim", image_of(DOTS), 1)
    assert actual.picks.tolist() == [[1]] and actual.extra is None


def test_ties_go_to_the_lower_index() -> None:
    assert select("trim", image_of([1.0, 1.0, 1.0, 1.0]), 3).picks.tolist() == [[0, 1]]


def test_every_tile_has_its_own_mean() -> None:
    actual = select("trim", image_of(DOTS, tiles=2), 5)
    # Three rows of tile 0, two of tile 1: two patches and one, and a mean each.
    assert actual.picks.tolist() == [[1, 5, 0]]
    assert actual.extra is not None
    assert actual.extra[0].tolist() == [[0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 1, 0]]


def test_segments_count_as_their_mean_and_padding_not_at_all() -> None:
    tokens = images(2)
    given = tokens.instruction
    assert given is not None
    one = replace(given, text=given.text.mean(dim=1, keepdim=True), segments=given.segments[:, :1])
    padded = replace(
        one,
        text=torch.cat([one.text, torch.full_like(one.text, torch.nan)], dim=1),
        segments=torch.tensor([[True, False]] * 2),
    )
    wanted = select("trim", tokens, 8).picks
    for instruction in (one, padded):
        assert torch.equal(
            select("trim", replace(tokens, instruction=instruction), 8).picks, wanted
        )


class TestPublished:
    """Native rows: raster order, the mean last."""

    def test_of_a_given_count(self) -> None:
        actual = native("trim", image_of(DOTS), 4)
        assert actual.indices[0].tolist() == [1, 3, 5, -1]
        assert actual.features is not None
        assert actual.features[0][:3].argmax(dim=1).tolist() == [1, 3, 5]
        assert actual.features[0][3].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3, 0])

    def test_the_number_of_outliers_is_adaptive(self) -> None:
        dots = [0.1 * (i % 5) for i in range(30)]
        dots[4], dots[17] = -6.0, -7.0
        assert native("trim", image_of(dots)).indices[0].tolist() == [4, 17, -1]

    def test_outliers_are_counted_over_all_tiles(self) -> None:
        dots = [0.1 * (i % 5) for i in range(60)]
        for token in (2, 3, 5, 7):
            dots[token] = -6.0
        # Four of 60 stand out: int(30 * 4 / 60) = 2 of each tile, whether they do there or not.
        actual = native("trim", image_of(dots, tiles=2)).indices[0].tolist()
        assert actual[:3] == [2, 3, -1] and len(actual) == 6 and actual[-1] == -1
        assert all(30 <= index < 60 for index in actual[3:5])

    def test_failure_of_the_published_code_is_an_error(self) -> None:
        for tokens, budget in ((image_of([1.0] * 20), None), (image_of(DOTS), 1)):
            with pytest.raises(SelectionError, match="keeps no patch"):
                native("trim", tokens, budget)


def test_the_mean_of_a_half_precision_tower_is_made_in_float32() -> None:
    tokens = image_of([0.0, *[1.0] * 399])
    tower = tokens.tower
    assert tower is not None
    large = torch.full((1, 400, 1), 300.0, dtype=torch.float16)  # their sum would overflow
    states = TowerStates(large, large, project=lambda rows: rows)
    half = replace(tokens, features=large, tower=states)
    extra: Tensor | None = select("trim", half, 2).extra
    assert extra is not None and extra.dtype == torch.float16
    assert extra.tolist() == [[[300.0]]]
