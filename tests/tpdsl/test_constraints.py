from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.samples import call, images, plain
from vllm_autoprune import VisualTokens
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.constraints import Revision, resolve_constraints, run_selector
from vllm_autoprune.tpdsl.numerics import mask_of

SELECTORS = ATOMS.names("selection_constraints")
EXCHANGE = "reference_residual_exchange_selector"
DPP = "anchor_controlled_pool_dpp_selector"


def select(
    name: str,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    pool: Tensor,
    quota: int,
    **parameters: object,
) -> Tensor:
    revision = Revision(
        tokens=tokens,
        picks=reference,
        pool=pool,
        g=g,
        quota=quota,
        kernel_call=call("pairwise_cosine_kernel"),
        partition_call=call("spatial_grid_partition"),
    )
    return run_selector(call(name, **parameters), revision)


def exchanged(g: list[float], reference: list[int], pool: list[int], quota: int) -> list[int]:
    """What the exchange selector keeps of one image."""
    size = len(g)
    kept = select(
        EXCHANGE,
        plain(torch.eye(size)),
        torch.tensor([g]),
        torch.tensor([reference]),
        mask_of(torch.tensor([pool], dtype=torch.int64), size),
        quota,
    )
    found: list[int] = kept[0].nonzero().flatten().tolist()
    return found


@pytest.mark.parametrize(
    ("q_e", "r_min", "budget", "expected"),
    [
        (2, None, 32, (2, 30)),
        (0, None, 32, (0, 32)),
        (40, None, 32, (32, 0)),  # the quota is larger than K
        (2, None, 1, (1, 0)),
        (2, 10, 32, (2, 10)),  # r_min leaves more room than the quota uses
        (20, 30, 32, (2, 30)),  # r_min leaves less
        (5, 32, 32, (0, 32)),
        (5, 40, 32, (0, 32)),
    ],
)
def test_the_quota_is_what_r_min_leaves(
    q_e: int, r_min: int | None, budget: int, expected: tuple[int, int]
) -> None:
    assert resolve_constraints(call(EXCHANGE, q_e=q_e, r_min=r_min), budget) == expected


class TestExchange:
    G = (0.5, 0.1, 0.3, 0.9, 0.2, 0.8)

    def test_the_lowest_give_way_to_the_highest(self) -> None:
        assert exchanged([*self.G], [0, 1, 2], [3, 4, 5], quota=2) == [0, 3, 5]

    def test_the_quota_bounds_the_swaps_and_the_best_pair_goes_first(self) -> None:
        assert exchanged([*self.G], [0, 1, 2], [3, 4, 5], quota=1) == [0, 2, 3]
        assert exchanged([*self.G], [0, 1, 2], [3, 4, 5], quota=0) == [0, 1, 2]

    def test_only_the_pool_is_swapped_in(self) -> None:
        assert exchanged([*self.G], [0, 1, 2], [4], quota=2) == [0, 2, 4]
        assert exchanged([*self.G], [0, 1, 2], [], quota=2) == [0, 1, 2]

    def test_a_swap_needs_a_better_candidate(self) -> None:
        assert exchanged([0.5, 0.1, 0.1, 0.4], [0, 1], [2, 3], quota=2) == [0, 3]
        assert exchanged([0.5, 0.1, 0.1, 0.05], [0, 1], [2, 3], quota=2) == [0, 1]

    def test_equal_quality_is_no_reason_to_swap(self) -> None:
        assert exchanged([0.5] * 6, [1, 3, 5], [0, 2, 4], quota=3) == [1, 3, 5]

    @given(seed=st.integers(0, 10_000), k=st.integers(1, 11), quota=st.integers(0, 12))
    def test_it_is_a_plain_loop_over_pairs(self, seed: int, k: int, quota: int) -> None:
        source = torch.Generator().manual_seed(seed)
        g = torch.rand(12, generator=source).tolist()
        order = torch.rand(12, generator=source).argsort().tolist()
        reference, pool = order[:k], order[k::2]
        quota = min(quota, k)
        kept = set(reference)
        pairs = zip(
            sorted(reference, key=lambda i: g[i]),
            sorted(pool, key=lambda i: -g[i]),
            strict=False,
        )
        for worst, best in list(pairs)[:quota]:
            if g[best] > g[worst]:
                kept = kept - {worst} | {best}
        assert exchanged(g, reference, pool, quota) == sorted(kept)


class TestDpp:
    def test_anchors_stay_and_the_rest_is_greedy_over_pool_and_reference(self) -> None:
        tokens = images(1, batch=1, width=24)
        reference = torch.tensor([[30, 4, 17, 9, 22]])
        pool = mask_of(torch.tensor([[1, 2, 3, 5, 6, 7, 8]]), 36)
        kept = select(DPP, tokens, torch.ones(1, 36), reference, pool, quota=2)
        expected = greedy_map(
            tokens.cosine,
            torch.ones(1, 36),
            5,
            anchors=torch.tensor([[30, 4, 17]]),
            eligible=pool | mask_of(reference, 36),
        )
        assert torch.equal(kept, mask_of(expected, 36))

    def test_the_first_picks_are_the_anchors_not_the_last(self) -> None:
        # 0 and 1 point the same way: with 1 anchored nothing speaks for 0, which came last.
        tokens = plain(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        pool = torch.tensor([[False, False, True]])
        kept = select(DPP, tokens, torch.ones(1, 3), torch.tensor([[1, 0]]), pool, quota=1)
        assert kept.tolist() == [[False, True, True]]

    def test_the_whole_reference_stays_where_it_is_the_most_diverse(self) -> None:
        tokens = plain(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.9, 0.1, 0.0]]))
        pool = torch.tensor([[False, False, True]])
        kept = select(DPP, tokens, torch.ones(1, 3), torch.tensor([[0, 1]]), pool, quota=1)
        assert kept.tolist() == [[True, True, False]]


@given(
    name=st.sampled_from(SELECTORS),
    seed=st.integers(0, 10_000),
    k=st.integers(1, 35),
    quota=st.integers(0, 35),
    poison=st.sampled_from(["", "g", "features", "both"]),
    value=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
)
def test_k_tokens_at_most_quota_of_them_new_and_all_from_pool_or_reference(
    name: str, seed: int, k: int, quota: int, poison: str, value: float
) -> None:
    quota = min(quota, k)
    tokens = images(seed)
    source = torch.Generator().manual_seed(seed)
    g = torch.rand(2, 36, generator=source)
    if poison in ("g", "both"):
        g[0, ::3] = value
    if poison in ("features", "both"):
        tokens.features[1, ::5] = value
    reference = torch.rand(2, 36, generator=source).argsort(dim=1)[:, :k]
    base = mask_of(reference, 36)
    pool = (torch.rand(2, 36, generator=source) < 0.3) & ~base
    kept = select(name, tokens, g, reference, pool, quota)
    assert kept.sum(dim=1).tolist() == [k, k]
    if name != "quality_topk_selector":  # it replaces everything, by whatever is best
        assert int((kept & ~base).sum(dim=1).max()) <= quota
        assert not (kept & ~base & ~pool).any()
