from __future__ import annotations

import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.atoms.selectors import select_batch, select_one
from tests.tpdsl.samples import images, plain, with_relevance
from vllm_autoprune import Grid
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import mask_from_indices

DPP = "anchor_controlled_pool_dpp_selector"


@means(DPP)
class TestDpp:
    def test_anchors_stay_and_the_rest_is_greedy_over_pool_and_reference(self) -> None:
        tokens = images(1, batch=1, width=24)
        reference = torch.tensor([[30, 4, 17, 9, 22]])
        pool = mask_from_indices(torch.tensor([[1, 2, 3, 5, 6, 7, 8]]), 36)
        kept = select_batch(DPP, tokens, torch.ones(1, 36), reference, pool, quota=2)
        expected = greedy_map(
            tokens.cosine,
            torch.ones(1, 36),
            5,
            anchors=torch.tensor([[30, 4, 17]]),
            eligible=pool | mask_from_indices(reference, 36),
        )
        assert torch.equal(kept, mask_from_indices(expected, 36))

    def test_the_first_picks_are_the_anchors_not_the_last(self) -> None:
        # 0 and 1 point the same way: with 1 anchored nothing speaks for 0, which came last.
        tokens = plain(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        pool = torch.tensor([[False, False, True]])
        kept = select_batch(DPP, tokens, torch.ones(1, 3), torch.tensor([[1, 0]]), pool, quota=1)
        assert kept.tolist() == [[False, True, True]]

    def test_the_whole_reference_stays_where_it_is_the_most_diverse(self) -> None:
        tokens = plain(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.9, 0.1, 0.0]]))
        pool = torch.tensor([[False, False, True]])
        kept = select_batch(DPP, tokens, torch.ones(1, 3), torch.tensor([[0, 1]]), pool, quota=1)
        assert kept.tolist() == [[True, True, False]]


@means("runtime_reference_anchor_pool_dpp_selector")
def test_the_runtime_kernel_follows_the_instruction_not_the_quality() -> None:
    name = "runtime_reference_anchor_pool_dpp_selector"
    # All unlike each other: relevance alone decides who joins anchor 0, whatever g says.
    tokens = with_relevance(plain(torch.eye(4)), torch.tensor([[0.5, 0.1, 0.2, 0.9]]))
    assert select_one(name, tokens, [0.5, 0.1, 0.9, 0.0], [0, 1], [2, 3], q_e=1) == [0, 3]
    other = with_relevance(plain(torch.eye(4)), torch.tensor([[0.5, 0.1, 0.2, -0.9]]))
    assert select_one(name, other, [0.5, 0.1, 0.9, 0.0], [0, 1], [2, 3], q_e=1) == [0, 2]


@means("constrained_pool_dpp_selector")
def test_cap_limits_the_tokens_of_each_part() -> None:
    name = "constrained_pool_dpp_selector"
    # Cells are 0-2, 3-5 and so on. All are unlike each other, so the first open token joins
    # anchor 0; with a cap of 1 the anchor has filled its cell.
    tokens = plain(torch.eye(12), Grid(1, 12))
    for cap, kept in ((2, [0, 1]), (1, [0, 4])):
        actual = select_one(name, tokens, [0.0] * 12, [0, 11], [1, 4], q_e=1, cell_cap=cap)
        assert actual == kept
