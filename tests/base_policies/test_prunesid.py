from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.base_policies.samples import images, native, select, tower_of
from vllm_autoprune import Grid, SelectionError
from vllm_autoprune.base_policies.prunesid import (
    find_distinct,
    group_quotas,
    mean_of_pairs,
    principal_loadings,
)


class TestGroups:
    """Tokens belong to the principal direction that they lie along."""

    def test_loadings_are_the_singular_vectors_of_centred_sigmoids(self) -> None:
        rows = torch.randn(2, 9, 20)
        squashed = torch.sigmoid(rows.double())
        expected, _, _ = torch.linalg.svd(squashed - squashed.mean(dim=2, keepdim=True))
        actual = principal_loadings(rows, 4)
        torch.testing.assert_close(actual, expected[:, :, :4].abs())

    def test_tokens_of_one_direction_are_one_group(self) -> None:
        one, other = torch.randn(2, 64)
        rows = torch.stack([one, other, one, other, one])[None]
        group = principal_loadings(rows, 2).argmax(dim=2)[0].tolist()
        assert group[0] == group[2] == group[4] != group[1] == group[3]


class TestDistinct:
    """Non-maximum suppression within groups."""

    SIMILARITY = torch.tensor([[[1.0, 0.9, 0.2], [0.9, 1.0, 0.8], [0.2, 0.8, 1.0]]])

    def run(self, order: list[int], group: list[int], bound: float) -> list[bool]:
        kept: list[bool] = find_distinct(
            self.SIMILARITY, torch.tensor([order]), torch.tensor([group]), torch.tensor([[bound]])
        )[0].tolist()
        return kept

    def test_a_token_that_repeats_a_better_one_is_dropped(self) -> None:
        assert self.run([0, 1, 2], [0, 0, 0], 0.5) == [True, False, True]

    def test_a_dropped_token_drops_no_other(self) -> None:
        # Token 1 repeats token 0 and would have dropped token 2.
        assert self.run([0, 1, 2], [0, 0, 0], 0.7) == [True, False, True]
        assert self.run([1, 0, 2], [0, 0, 0], 0.7) == [False, True, False]

    def test_groups_do_not_suppress_each_other(self) -> None:
        assert self.run([0, 1, 2], [0, 1, 0], 0.5) == [True, True, True]

    def test_a_high_bound_drops_nothing(self) -> None:
        assert self.run([2, 1, 0], [0, 0, 0], 1.0) == [True, True, True]


class TestQuotas:
    """A budget over groups, by their distinct members."""

    def run(self, members: list[int], distinct: list[int], budget: int) -> list[int]:
        taken: list[int] = group_quotas(
            torch.tensor([members]), torch.tensor([distinct]), budget, budget
        )[0].tolist()
        return taken

    def test_one_for_each_group_and_the_rest_by_distinct_members(self) -> None:
        # Shares of 4 beside one each: rounded ends of 4/7, 6/7, 7/7 of 4 are 2, 3 and 4.
        assert self.run([10, 10, 10], [8, 4, 2], 7) == [3, 2, 2]

    def test_an_empty_group_gives_nothing(self) -> None:
        assert self.run([0, 9, 9], [0, 5, 5], 6) == [0, 3, 3]

    def test_a_group_gives_no_more_than_it_has(self) -> None:
        assert self.run([2, 20], [2, 3], 12) == [2, 10]

    def test_what_a_group_lacks_goes_to_the_largest(self) -> None:
        # At most five of a group per 64 tokens, until the budget is reached.
        assert self.run([30, 30, 30], [20, 3, 3], 11) == [5, 3, 3]


def test_mean_of_pairs_leaves_the_diagonal_out() -> None:
    assert mean_of_pairs(torch.tensor([[[1.0, 0.4], [0.4, 1.0]]])).tolist() == [
        [pytest.approx(0.4)]
    ]


@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(3, 4, tiles=3)])
def test_with_cls_the_tokens_are_the_published_ones(grid: Grid) -> None:
    tokens = images(1, grid=grid)
    served = select("prunesid", tokens, 12, mode="cls")
    published = native("prunesid", tokens, 12, mode="cls")
    assert served.extra is not None and served.extra.shape[1] == grid.tiles
    for image, indices in enumerate(published.indices):
        assert int((indices < 0).sum()) == grid.tiles
        assert set(indices[indices >= 0].tolist()) == set(served.picks[image].tolist())
    tower = tower_of(tokens)
    assert tower.cls is not None
    torch.testing.assert_close(served.extra, tower.project(tower.cls))


def test_a_single_row_is_a_patch() -> None:
    served = select("prunesid", images(2), 1, mode="cls")
    assert served.picks.shape == (2, 1) and served.extra is None


def test_patches_take_the_place_of_cls() -> None:
    served = select("prunesid", images(3), 12)
    assert served.picks.shape == (2, 12) and served.extra is None and served.merged is None


def test_without_suppression_a_group_gives_its_most_attended_tokens() -> None:
    tokens = images(4, batch=1)
    picks = select("prunesid", tokens, 9, groups=1, threshold=100.0).picks
    order = tokens.require_cls_attention().argsort(dim=1, descending=True, stable=True)
    assert torch.equal(picks, order[:, :9])


def test_suppression_prefers_tokens_that_differ() -> None:
    """Two directions in one group: the second most attended token repeats the first."""
    tokens = images(5, batch=1, grid=Grid(1, 4))
    one, other = torch.randn(2, 12)
    rows = torch.stack([one, one, other, other])[None]
    attention = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    alike = replace(tokens, encoder=rows, cls_attention=attention)
    strict = select("prunesid", alike, 2, groups=1, threshold=1.0).picks
    lax = select("prunesid", alike, 2, groups=1, threshold=100.0).picks
    assert (strict.tolist(), lax.tolist()) == ([[0, 2]], [[0, 1]])


def test_the_form_for_qwen_reads_features_alone() -> None:
    tokens = images(6)
    bare = replace(tokens, cls_attention=None, encoder=None, tower=None)
    picks = select("prunesid", bare, 12, mode="qwen").picks
    assert torch.equal(picks, select("prunesid", tokens, 12, mode="qwen").picks)


def test_a_tower_without_cls_has_patches_alone() -> None:
    tokens = images(7)
    without = replace(tokens, tower=replace(tower_of(tokens), cls=None))
    assert select("prunesid", without, 4).picks.shape == (2, 4)
    with pytest.raises(SelectionError, match="use mode 'patch'"):
        select("prunesid", without, 4, mode="cls")


def test_earlier_picks_are_the_first_of_every_group() -> None:
    """A core or a prior takes the first picks: no group may be left out of them."""
    tokens = images(8, batch=1)
    group = principal_loadings(tokens.require_encoder(), 3).argmax(dim=2)[0]
    picks = select("prunesid", tokens, 12, groups=3).picks[0]
    kinds = group.unique().numel()
    assert group[picks[:kinds]].unique().numel() == kinds
