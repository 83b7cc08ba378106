"""Levels of the four reassembly axes, with values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import call, images, plain, token_selection, with_relevance
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.atoms.reassembly import ASSIGNMENTS, neighbourhood, run_reassembly
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.registry import AtomCall

# Token 2 is like 0, token 3 is between, token 4 is like 1; 0 and 1 are kept.
ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
KEPT = torch.tensor([[0, 1]])
COSINES = [[1.0, 0.0], [0.0, 1.0], [0.8944, 0.4472], [0.7071, 0.7071], [0.3162, 0.9487]]


def near(values: Tensor, expected: list[list[float]]) -> bool:
    return torch.allclose(values.float(), torch.tensor(expected), atol=1e-3)


class TestAssignment:
    @staticmethod
    def share(level: int, call: AtomCall) -> Tensor:
        share = ASSIGNMENTS[level].function(call, torch.tensor([COSINES]), KEPT, Grid(1, 5))
        assert isinstance(share, Tensor)
        return share

    def test_nearest_gives_all_to_the_most_similar_and_ties_to_the_first(self) -> None:
        share = self.share(0, call("mean_residual"))
        assert share[0].tolist() == [[1, 0], [0, 1], [1, 0], [1, 0], [0, 1]]

    def test_soft_shares_by_a_softmax(self) -> None:
        share = self.share(1, call("anchor_weighted_residual", tau=0.5))
        odds = math.exp((0.8944 - 0.4472) / 0.5)
        assert share[0, 2].tolist() == pytest.approx([odds / (1 + odds), 1 / (1 + odds)], abs=1e-4)
        assert share[0, 3].tolist() == pytest.approx([0.5, 0.5])

    def test_local_gives_to_no_anchor_out_of_reach(self) -> None:
        # In one row, token 3 reaches only anchor 1, and token 4 none, with a radius of 2.
        share = self.share(2, call("spatial_local_residual_merge", radius=2))
        assert share[0, 2:].tolist() == [[1, 0], [0, 1], [0, 0]]

    def test_tokens_of_different_tiles_are_no_neighbours(self) -> None:
        close = neighbourhood(Grid(1, 2, tiles=2), 1, torch.device("cpu"))
        pairs = [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
        assert close.tolist() == pairs

    def test_the_radius_is_a_square(self) -> None:
        close = neighbourhood(Grid(3, 3), 1, torch.device("cpu"))
        assert close[0].nonzero().flatten().tolist() == [0, 1, 3, 4]


class TestAggregationAndOutput:
    """Strength 0.5 on the five tokens above: 2 and 3 belong to anchor 0, and 4 to anchor 1."""

    def rows(self, name: str, tokens: VisualTokens | None = None, **parameters: float) -> Tensor:
        parameters = parameters or {"strength": 0.5}
        actual, order = run_reassembly(
            call(name, **parameters), tokens or plain(ROWS), token_selection(KEPT)
        )
        assert torch.equal(order, KEPT)
        return actual[0]

    def test_mean_residual(self) -> None:
        # Means of the members: (1.5, 1) and (1, 3).
        assert near(self.rows("mean_residual"), [[1.25, 0.5], [0.5, 2.0]])

    def test_mean_average_counts_the_anchor(self) -> None:
        # Means with the anchors: (4/3, 2/3) and (0.5, 2).
        assert near(self.rows("nearest_anchor"), [[7 / 6, 1 / 3], [0.25, 1.5]])

    def test_members_are_weighted_by_similarity(self) -> None:
        a, b = COSINES[2][0], COSINES[3][0]
        x, y = (2 * a + b) / (a + b), (a + b) / (a + b)
        expected = [[(1 + x) / 2, y / 2], [0.5, 2.0]]
        assert near(self.rows("similarity_weighted_residual_merge"), expected)

    def test_tokens_of_negative_cosine_have_weight_zero(self) -> None:
        tokens = plain(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        actual, _ = run_reassembly(
            call("similarity_weighted_residual_merge", strength=0.5),
            tokens,
            token_selection(torch.tensor([[0]])),
        )
        assert actual[0].tolist() == [[1.0, 0.0]]

    def test_members_are_gated_and_weighted_by_relevance(self) -> None:
        # Normalised relevance is 0, 1, 0.5, 0.75, 0.25; the gate at half of five is 0.5.
        tokens = with_relevance(plain(ROWS), torch.tensor([[0.0, 0.8, 0.4, 0.6, 0.2]]))
        x, y = (0.5 * 2 + 0.75 * 1) / 1.25, 1.0
        expected = [[(1 + x) / 2, y / 2], [0.0, 1.0]]
        assert near(self.rows("semantic_gated_residual_merge", tokens), expected)

    def test_the_gate_opens_wider_with_a_lower_quantile(self) -> None:
        tokens = with_relevance(plain(ROWS), torch.tensor([[0.0, 0.8, 0.4, 0.6, 0.2]]))
        actual = self.rows(
            "semantic_gated_residual_merge", tokens, strength=0.5, gate_quantile=0.25
        )
        assert near(actual[1:], [[0.5, 2.0]])

    def test_an_exchange_takes_the_most_central_of_the_group(self) -> None:
        # Group 0 is (1, 0), and (2, 1) and (1, 1) by likeness: its middle is nearest to (2, 1).
        # Group 1 is (0, 1), and (1, 3) by a likeness below 1: the anchor is nearer the middle.
        assert near(self.rows("anchor_exchange", margin=0.0), [[2.0, 1.0], [0.0, 1.0]])

    def test_margin_of_two_prevents_every_exchange(self) -> None:
        assert near(self.rows("anchor_exchange", margin=2.0), [[1.0, 0.0], [0.0, 1.0]])
        assert near(self.rows("anchor_exchange", margin=0.5), [[1.0, 0.0], [0.0, 1.0]])


class TestOrdering:
    G = torch.tensor([[0.1, 0.9, 0.5, 0.9, 0.3]])
    INDICES = torch.tensor([[0, 1, 3, 4]])
    PICKS = torch.tensor([[4, 2, 0, 1]])

    def order(self, name: str) -> list[int]:
        rows, order = run_reassembly(
            call(name), plain(ROWS), token_selection(self.INDICES, self.PICKS, self.G)
        )
        assert torch.equal(rows[0], ROWS[order[0]])
        actual: list[int] = order[0].tolist()
        return actual

    def test_raster_ascends(self) -> None:
        assert self.order("mean_residual") == [0, 1, 3, 4]

    def test_score_descends_and_ties_go_by_place(self) -> None:
        assert self.order("reassemble/nearest.mean.residual.score") == [1, 3, 4, 0]

    def test_pick_follows_the_base_policy_and_exchanged_tokens_come_last(self) -> None:
        assert self.order("reassemble/nearest.mean.residual.pick") == [4, 0, 1, 3]


def test_rows_merged_by_the_base_policy_are_the_anchors() -> None:
    merged = torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    whole = torch.zeros(1, dtype=torch.uint8)
    selection = TokenSelection(KEPT, ReferenceSelection(KEPT, merged=merged), whole)
    rows, _ = run_reassembly(call("mean_residual", strength=0.5), plain(ROWS), selection)
    assert near(rows[0], [[(9 + 1.5) / 2, 0.5], [0.5, 6.0]])


ANCHORS = torch.tensor([[0, 3]])
# Tokens 1 and 2 point as 0 does and token 4 as 3 does; 5 is as near to one as to the other.
TOKENS = plain(
    torch.tensor([[4.0, 0.0], [2.0, 0.0], [8.0, 2.0], [0.0, 4.0], [2.0, 10.0], [3.0, 3.0]])
)


def merge_rows(atom: AtomCall, tokens: VisualTokens, indices: Tensor) -> Tensor:
    """Rows after reassembly; the base policy has merged nothing."""
    rows, order = run_reassembly(atom, tokens, token_selection(indices))
    assert torch.equal(order, indices)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strength_zero_is_a_bit_identical_gather(dtype: torch.dtype) -> None:
    tokens = images(1, dtype=dtype)
    indices = torch.tensor([[2, 3, 11], [0, 30, 35]])
    rows = merge_rows(call("mean_residual"), tokens, indices)
    assert rows.dtype == dtype
    assert torch.equal(rows[1, 2], tokens.features[1, 35])
    assert torch.equal(rows, gather_rows(tokens.features, indices))


def test_half_strength_by_hand() -> None:
    rows = merge_rows(call("mean_residual", strength=0.5), TOKENS, ANCHORS)
    # Row 0: mean of (2, 0), (8, 2), and (3, 3) as ties go to the first: (13/3, 5/3).
    # Row 1: (2, 10) alone.
    first = [4 + 0.5 * (13 / 3 - 4), 0.5 * (5 / 3)]
    assert rows[0].tolist() == [pytest.approx(first), pytest.approx([1.0, 7.0])]


def test_strength_is_linear() -> None:
    half = merge_rows(call("mean_residual", strength=0.5), TOKENS, ANCHORS)
    tenth = merge_rows(call("mean_residual", strength=0.1), TOKENS, ANCHORS)
    anchors = gather_rows(TOKENS.features, ANCHORS)
    assert torch.allclose((half - anchors) / 5, tenth - anchors, atol=1e-6)


def test_anchor_without_members_is_unchanged() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    rows = merge_rows(call("mean_residual", strength=0.5), tokens, torch.tensor([[0, 2]]))
    assert rows[0, 1].tolist() == [0.0, 1.0]
    assert rows[0, 0].tolist() == [1.0, pytest.approx(0.05)]


def test_kept_tokens_are_not_merged_into_each_other() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    rows = merge_rows(call("mean_residual", strength=0.5), tokens, torch.tensor([[0, 1, 2]]))
    assert torch.equal(rows, tokens.features)


def test_dtype_and_shape_stay() -> None:
    tokens = images(2, dtype=torch.bfloat16)
    rows = merge_rows(call("mean_residual", strength=0.3), tokens, torch.tensor([[1, 5]] * 2))
    assert rows.shape == (2, 2, 16) and rows.dtype == torch.bfloat16
