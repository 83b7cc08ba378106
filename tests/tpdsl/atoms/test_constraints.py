from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.every import means
from tests.tpdsl.samples import call, images, plain, with_relevance
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.constraints import SelectorInputs, resolve_constraints, run_selector
from vllm_autoprune.tpdsl.registry import ATOMS

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
    revision = SelectorInputs(
        tokens=tokens,
        picks=reference,
        pool=pool,
        g=g,
        quota=quota,
        kernel_call=call("pairwise_cosine_kernel"),
        partition_call=call("spatial_grid_partition"),
    )
    return run_selector(call(name, **parameters), revision)


def select_one(g: list[float], reference: list[int], pool: list[int], quota: int) -> list[int]:
    """Tokens that the exchange selector keeps of one image."""
    size = len(g)
    kept = select(
        EXCHANGE,
        plain(torch.eye(size)),
        torch.tensor([g]),
        torch.tensor([reference]),
        mask_from_indices(torch.tensor([pool], dtype=torch.int64), size),
        quota,
    )
    actual: list[int] = kept[0].nonzero().flatten().tolist()
    return actual


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


@means(EXCHANGE)
class TestExchange:
    G = (0.5, 0.1, 0.3, 0.9, 0.2, 0.8)

    def test_lowest_quality_is_exchanged_for_highest(self) -> None:
        assert select_one([*self.G], [0, 1, 2], [3, 4, 5], quota=2) == [0, 3, 5]

    def test_the_quota_bounds_the_swaps_and_the_best_pair_goes_first(self) -> None:
        assert select_one([*self.G], [0, 1, 2], [3, 4, 5], quota=1) == [0, 2, 3]
        assert select_one([*self.G], [0, 1, 2], [3, 4, 5], quota=0) == [0, 1, 2]

    def test_only_the_pool_is_swapped_in(self) -> None:
        assert select_one([*self.G], [0, 1, 2], [4], quota=2) == [0, 2, 4]
        assert select_one([*self.G], [0, 1, 2], [], quota=2) == [0, 1, 2]

    def test_a_swap_needs_a_better_candidate(self) -> None:
        assert select_one([0.5, 0.1, 0.1, 0.4], [0, 1], [2, 3], quota=2) == [0, 3]
        assert select_one([0.5, 0.1, 0.1, 0.05], [0, 1], [2, 3], quota=2) == [0, 1]

    def test_equal_quality_is_no_reason_to_swap(self) -> None:
        assert select_one([0.5] * 6, [1, 3, 5], [0, 2, 4], quota=3) == [1, 3, 5]

    @given(seed=st.integers(0, 10_000), k=st.integers(1, 11), quota=st.integers(0, 12))
    def test_equals_a_loop_over_pairs(self, seed: int, k: int, quota: int) -> None:
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
        assert select_one(g, reference, pool, quota) == sorted(kept)


@means(DPP)
class TestDpp:
    def test_anchors_stay_and_the_rest_is_greedy_over_pool_and_reference(self) -> None:
        tokens = images(1, batch=1, width=24)
        reference = torch.tensor([[30, 4, 17, 9, 22]])
        pool = mask_from_indices(torch.tensor([[1, 2, 3, 5, 6, 7, 8]]), 36)
        kept = select(DPP, tokens, torch.ones(1, 36), reference, pool, quota=2)
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
    base = mask_from_indices(reference, 36)
    pool = (torch.rand(2, 36, generator=source) < 0.3) & ~base
    kept = select(name, tokens, g, reference, pool, quota)
    assert kept.sum(dim=1).tolist() == [k, k]
    if name != "quality_topk_selector":  # it replaces everything, by whatever is best
        assert int((kept & ~base).sum(dim=1).max()) <= quota
        assert not (kept & ~base & ~pool).any()


def kept_of(
    name: str,
    tokens: VisualTokens,
    g: list[float],
    reference: list[int],
    pool: list[int],
    **parameters: object,
) -> list[int]:
    """Tokens that a selector keeps of one image, with quota q_e."""
    quota = parameters.get("q_e", 2)
    assert isinstance(quota, int)
    kept = select(
        name,
        tokens,
        torch.tensor([g]),
        torch.tensor([reference]),
        mask_from_indices(torch.tensor([pool], dtype=torch.int64), len(g)),
        quota,
        **parameters,
    )
    actual: list[int] = kept[0].nonzero().flatten().tolist()
    return actual


class TestMargins:
    NAME = "reference_margin_gated_exchange_selector"
    STRICT = "reference_strict_margin_exchange_selector"
    G = (0.5, 0.25, 1.0, 0.375, 0.4375)

    @means(NAME)
    def test_a_swap_needs_the_margin(self) -> None:
        # Gains of the two best pairs: 1 - 0.25 = 0.75 and 0.4375 - 0.5 < 0.
        tokens = plain(torch.eye(5))
        assert kept_of(self.NAME, tokens, [*self.G], [0, 1], [2, 3, 4], margin=0.75) == [0, 2]
        assert kept_of(self.NAME, tokens, [*self.G], [0, 1], [2, 3, 4], margin=0.76) == [0, 1]
        assert kept_of(self.NAME, tokens, [0.5] * 5, [0, 1], [2, 3, 4], margin=0.0) == [0, 1]

    @means(STRICT)
    def test_a_strict_swap_needs_a_share_more(self) -> None:
        # 1 for 0.125, then 0.375 for 0.25: exactly half more.
        tokens, g = plain(torch.eye(5)), [0.25, 0.125, 1.0, 0.375, 0.1]
        for margin, kept in ((0.5, [2, 3]), (0.51, [0, 2])):
            assert kept_of(self.STRICT, tokens, g, [0, 1], [2, 3, 4], margin=margin) == kept

    def test_strict_swap_refuses_tokens_similar_to_kept_ones(self) -> None:
        # Token 2 is the best and the same as 0, which stays; token 3 is unlike both.
        tokens = plain(torch.tensor([[1.0, 0, 0], [0, 1, 0], [2, 0, 0], [0, 0, 1]]))
        g = [0.5, 0.1, 0.9, 0.4]
        assert kept_of(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=1) == [0, 3]
        assert kept_of(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=1, max_sim=1.0) == [0, 2]

    def test_similarity_to_removed_tokens_is_ignored(self) -> None:
        # 1 leaves first, so its twin 2 may come; then 2's twin 3 may not, and 0 stays.
        tokens = plain(torch.tensor([[1.0, 0], [0, 1], [0, 3], [0, 2]]))
        g = [0.3, 0.1, 0.9, 0.8]
        assert kept_of(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=2) == [0, 2]


class TestMarginalRelevance:
    NAME = "maximal_marginal_relevance_pool_selector"
    # Token 2 is a bit better than 3, but much like 0, which stays.
    TOKENS = plain(
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    )

    @means(NAME)
    def test_similarity_penalises_a_candidate(self) -> None:
        g = [0.5, 0.0, 0.9, 0.8]
        chosen = {
            lam: kept_of(self.NAME, self.TOKENS, g, [0, 1], [2, 3], q_e=1, lam=lam)
            for lam in (1.0, 0.5)
        }
        # At 0.5: 0.45 - 0.4 for token 2, 0.4 for token 3, and 0 for token 1, which would leave.
        assert chosen == {1.0: [0, 2], 0.5: [0, 3]}

    def test_dissimilar_token_of_lower_quality_may_enter(self) -> None:
        # Token 1 is the same as 0 and better than 3: at 0.5, 0.15 - 0.5 against 0.1.
        tokens = plain(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
        g = [0.5, 0.3, 0.9, 0.2]
        assert kept_of(self.NAME, tokens, g, [0, 1], [3], q_e=1, lam=0.5) == [0, 3]
        assert kept_of(self.NAME, tokens, g, [0, 1], [3], q_e=1, lam=1.0) == [0, 1]

    @given(seed=st.integers(0, 10_000), k=st.integers(1, 9), quota=st.integers(0, 9))
    def test_equals_a_plain_loop(self, seed: int, k: int, quota: int) -> None:
        source = torch.Generator().manual_seed(seed)
        tokens = plain(torch.randn(12, 6, generator=source))
        g = torch.rand(12, generator=source).tolist()
        order = torch.rand(12, generator=source).argsort().tolist()
        reference, pool = order[:k], set(order[k:])
        kept, cosine = set(reference), tokens.cosine[0]

        def worth(token: int, others: set[int]) -> float:
            alike = max((float(cosine[token, other]) for other in others), default=-1.0)
            return 0.7 * g[token] - 0.3 * alike

        for leaving in sorted(reference, key=lambda i: g[i])[:quota]:
            others = kept - {leaving}
            best = max(pool, key=lambda i: worth(i, others), default=None)
            if best is None or worth(best, others) <= worth(leaving, others):
                break
            kept, pool = others | {best}, pool - {best}
        actual = kept_of(self.NAME, tokens, g, reference, order[k:], q_e=min(quota, k))
        assert actual == sorted(kept)


@means("reference_strict_preservation_selector")
def test_preservation_keeps_the_reference_at_every_budget() -> None:
    name = "reference_strict_preservation_selector"
    assert resolve_constraints(call(name), 32) == (0, 32)
    assert kept_of(name, plain(torch.eye(4)), [0.0, 0.1, 0.9, 0.8], [0, 1], [2, 3]) == [0, 1]


@means("quality_topk_selector")
def test_top_k_ignores_the_reference() -> None:
    name = "quality_topk_selector"
    assert resolve_constraints(call(name), 1000) == (1000, 0)
    assert kept_of(name, plain(torch.eye(5)), [0.3, 0.1, 0.9, 0.8, 0.2], [0, 1], [4]) == [2, 3]


@means("runtime_reference_anchor_pool_dpp_selector")
def test_the_runtime_kernel_follows_the_instruction_not_the_quality() -> None:
    name = "runtime_reference_anchor_pool_dpp_selector"
    # All unlike each other: relevance alone decides who joins anchor 0, whatever g says.
    tokens = with_relevance(plain(torch.eye(4)), torch.tensor([[0.5, 0.1, 0.2, 0.9]]))
    assert kept_of(name, tokens, [0.5, 0.1, 0.9, 0.0], [0, 1], [2, 3], q_e=1) == [0, 3]
    other = with_relevance(plain(torch.eye(4)), torch.tensor([[0.5, 0.1, 0.2, -0.9]]))
    assert kept_of(name, other, [0.5, 0.1, 0.9, 0.0], [0, 1], [2, 3], q_e=1) == [0, 2]


@means("constrained_pool_dpp_selector")
def test_cap_limits_the_tokens_of_each_part() -> None:
    name = "constrained_pool_dpp_selector"
    # Cells are 0-2, 3-5 and so on. All are unlike each other, so the first open token joins
    # anchor 0; with a cap of 1 the anchor has filled its cell.
    tokens = plain(torch.eye(12), Grid(1, 12))
    for cap, kept in ((2, [0, 1]), (1, [0, 4])):
        actual = kept_of(name, tokens, [0.0] * 12, [0, 11], [1, 4], q_e=1, cell_cap=cap)
        assert actual == kept
