from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tpdsl.atom_policies import means
from tests.tpdsl.atoms.selectors import select_batch, select_one
from tests.tpdsl.samples import call, images, plain
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.selectors import resolve_constraints
from vllm_autoprune.tpdsl.registry import ATOMS

SELECTORS = ATOMS.names("selection_constraints")
EXCHANGE = "reference_residual_exchange_selector"


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

    def select(
        self, g: list[float], reference: list[int], pool: list[int], quota: int
    ) -> list[int]:
        return select_one(EXCHANGE, plain(torch.eye(len(g))), g, reference, pool, q_e=quota)

    def test_lowest_quality_is_exchanged_for_highest(self) -> None:
        assert self.select([*self.G], [0, 1, 2], [3, 4, 5], quota=2) == [0, 3, 5]

    def test_the_quota_bounds_the_swaps_and_the_best_pair_goes_first(self) -> None:
        assert self.select([*self.G], [0, 1, 2], [3, 4, 5], quota=1) == [0, 2, 3]
        assert self.select([*self.G], [0, 1, 2], [3, 4, 5], quota=0) == [0, 1, 2]

    def test_only_the_pool_is_swapped_in(self) -> None:
        assert self.select([*self.G], [0, 1, 2], [4], quota=2) == [0, 2, 4]
        assert self.select([*self.G], [0, 1, 2], [], quota=2) == [0, 1, 2]

    def test_a_swap_needs_a_better_candidate(self) -> None:
        assert self.select([0.5, 0.1, 0.1, 0.4], [0, 1], [2, 3], quota=2) == [0, 3]
        assert self.select([0.5, 0.1, 0.1, 0.05], [0, 1], [2, 3], quota=2) == [0, 1]

    def test_equal_quality_is_no_reason_to_swap(self) -> None:
        assert self.select([0.5] * 6, [1, 3, 5], [0, 2, 4], quota=3) == [1, 3, 5]

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
        assert self.select(g, reference, pool, quota) == sorted(kept)


@example(name=EXCHANGE, seed=1, k=1, quota=1, poison="g", value=torch.inf)
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
    kept = select_batch(name, tokens, g, reference, pool, quota)
    assert kept.sum(dim=1).tolist() == [k, k]
    if name != "quality_topk_selector":  # it replaces everything, by whatever is best
        assert int((kept & ~base).sum(dim=1).max()) <= quota
        assert not (kept & ~base & ~pool).any()


class TestMargins:
    NAME = "reference_margin_gated_exchange_selector"
    STRICT = "reference_strict_margin_exchange_selector"
    G = (0.5, 0.25, 1.0, 0.375, 0.4375)

    @means(NAME)
    def test_a_swap_needs_the_margin(self) -> None:
        # Gains of the two best pairs: 1 - 0.25 = 0.75 and 0.4375 - 0.5 < 0.
        tokens = plain(torch.eye(5))
        assert select_one(self.NAME, tokens, [*self.G], [0, 1], [2, 3, 4], margin=0.75) == [0, 2]
        assert select_one(self.NAME, tokens, [*self.G], [0, 1], [2, 3, 4], margin=0.76) == [0, 1]
        assert select_one(self.NAME, tokens, [0.5] * 5, [0, 1], [2, 3, 4], margin=0.0) == [0, 1]

    @means(STRICT)
    def test_a_strict_swap_needs_a_share_more(self) -> None:
        # 1 for 0.125, then 0.375 for 0.25: exactly half more.
        tokens, g = plain(torch.eye(5)), [0.25, 0.125, 1.0, 0.375, 0.1]
        for margin, kept in ((0.5, [2, 3]), (0.51, [0, 2])):
            assert select_one(self.STRICT, tokens, g, [0, 1], [2, 3, 4], margin=margin) == kept

    def test_strict_swap_refuses_tokens_similar_to_kept_ones(self) -> None:
        # Token 2 is the best and the same as 0, which stays; token 3 is unlike both.
        tokens = plain(torch.tensor([[1.0, 0, 0], [0, 1, 0], [2, 0, 0], [0, 0, 1]]))
        g = [0.5, 0.1, 0.9, 0.4]
        assert select_one(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=1) == [0, 3]
        assert select_one(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=1, max_sim=1.0) == [
            0,
            2,
        ]

    def test_similarity_to_removed_tokens_is_ignored(self) -> None:
        # 1 leaves first, so its twin 2 may come; then 2's twin 3 may not, and 0 stays.
        tokens = plain(torch.tensor([[1.0, 0], [0, 1], [0, 3], [0, 2]]))
        g = [0.3, 0.1, 0.9, 0.8]
        assert select_one(self.STRICT, tokens, g, [0, 1], [2, 3], q_e=2) == [0, 2]


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
            lam: select_one(self.NAME, self.TOKENS, g, [0, 1], [2, 3], q_e=1, lam=lam)
            for lam in (1.0, 0.5)
        }
        # At 0.5: 0.45 - 0.4 for token 2, 0.4 for token 3, and 0 for token 1, which would leave.
        assert chosen == {1.0: [0, 2], 0.5: [0, 3]}

    def test_dissimilar_token_of_lower_quality_may_enter(self) -> None:
        # Token 1 is the same as 0 and better than 3: at 0.5, 0.15 - 0.5 against 0.1.
        tokens = plain(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
        g = [0.5, 0.3, 0.9, 0.2]
        assert select_one(self.NAME, tokens, g, [0, 1], [3], q_e=1, lam=0.5) == [0, 3]
        assert select_one(self.NAME, tokens, g, [0, 1], [3], q_e=1, lam=1.0) == [0, 1]

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
        actual = select_one(self.NAME, tokens, g, reference, order[k:], q_e=min(quota, k))
        assert actual == sorted(kept)


@means("reference_strict_preservation_selector")
def test_preservation_keeps_the_reference_at_every_budget() -> None:
    name = "reference_strict_preservation_selector"
    assert resolve_constraints(call(name), 32) == (0, 32)
    assert select_one(name, plain(torch.eye(4)), [0.0, 0.1, 0.9, 0.8], [0, 1], [2, 3]) == [0, 1]


@means("quality_topk_selector")
def test_top_k_ignores_the_reference() -> None:
    name = "quality_topk_selector"
    assert resolve_constraints(call(name), 1000) == (1000, 0)
    assert select_one(name, plain(torch.eye(5)), [0.3, 0.1, 0.9, 0.8, 0.2], [0, 1], [4]) == [2, 3]
