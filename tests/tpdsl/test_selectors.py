"""Selectors and candidate pools, by hand and against plain loops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.samples import call, images, means, plain, with_relevance
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import SizedPool, build_pool
from vllm_autoprune.tpdsl.atoms.selectors import SelectorInputs, resolve_constraints, run_selector
from vllm_autoprune.tpdsl.registry import ATOMS


def select_batch(
    name: str,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    pool: Tensor,
    quota: int,
    **parameters: object,
) -> Tensor:
    """Kept tokens as a mask ``(B, N)``."""
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


def select_one(
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
    kept = select_batch(
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
    def select(
        self, g: list[float], reference: list[int], pool: list[int], quota: int
    ) -> list[int]:
        return select_one(EXCHANGE, plain(torch.eye(len(g))), g, reference, pool, q_e=quota)

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


@means("maximal_marginal_relevance_pool_selector")
class TestMarginalRelevance:
    NAME = "maximal_marginal_relevance_pool_selector"

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


QUALITY = call("quality_pool_builder")
NONE = torch.zeros(1, 4)
SIZED = ATOMS.of_kind("candidate_pool", SizedPool)


def positions(mask: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask]


@means("quality_pool_builder")
def test_quality_takes_the_best_outside_the_reference() -> None:
    g = torch.tensor([[0.9, 0.8, 0.1, 0.7, 0.6, 0.2]])
    pool = build_pool([QUALITY], plain(torch.eye(6)), g, torch.tensor([[0, 4]]))
    assert positions(pool) == [[1, 3]]


@means("diversity_pool_builder")
def test_diversity_takes_the_farthest_from_the_reference_and_from_each_other() -> None:
    angles = torch.tensor([0.0, 5.0, 90.0, 95.0, 180.0, 185.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1))
    pool = build_pool(
        [call("diversity_pool_builder", pool_ratio=2.0)],
        tokens,
        torch.zeros(1, 6),
        torch.tensor([[0]]),
    )
    # 180 degrees is farthest from 0; then 90 and 95 are, by 5 degrees, ahead of 185 and 5.
    assert positions(pool) == [[2, 4]]


def test_diversity_respects_the_tile_scope() -> None:
    """Token 2 is the reference's twin in another tile; token 1, in its own tile, is at 60 degrees.

    Within tiles the twin is nothing to the reference (cosine 0), so it is the farthest of all but
    token 3, which lies opposite its own tile's token 2 once that is picked.
    """
    angles = torch.tensor([0.0, 60.0, 0.0, 120.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1), Grid(1, 2, tiles=2))
    pool, reference = call("diversity_pool_builder"), torch.tensor([[0]])
    actual = {
        scope: positions(
            build_pool([pool], dataclasses.replace(tokens, tile_scope=scope), NONE, reference)
        )
        for scope in ("per_tile", "global")
    }
    assert actual == {"per_tile": [[2]], "global": [[3]]}
    two = call("diversity_pool_builder", pool_ratio=2.0)
    assert positions(build_pool([two], tokens, NONE, reference)) == [[2, 3]]


def test_builders_are_applied_in_sequence() -> None:
    g = torch.tensor([[0.0, 0.9, 0.8, 0.7, 0.1, 0.2]])
    tokens = plain(torch.tensor([[1.0, 0.0]] * 3 + [[1.0, 1.0], [-1.0, 0.0], [-1.0, 0.1]]))
    reference = torch.tensor([[0]])
    quality = call("quality_pool_builder", pool_ratio=3.0)
    diversity = call("diversity_pool_builder", pool_ratio=1.0)
    assert positions(build_pool([quality], tokens, g, reference)) == [[1, 2, 3]]
    # Token 4 is farthest of all, but the pool of good tokens does not hold it.
    assert positions(build_pool([quality, diversity], tokens, g, reference)) == [[3]]
    assert positions(build_pool([diversity], tokens, g, reference)) == [[4]]


@pytest.mark.parametrize(
    ("ratio", "size"), [(0.25, 2), (0.5, 3), (1.0, 6), (1.5, 9), (2.0, 12), (8.0, 30)]
)
@pytest.mark.parametrize("name", SIZED)
def test_the_pool_is_a_multiple_of_the_budget_as_far_as_there_are_tokens(
    name: str, ratio: float, size: int
) -> None:
    tokens, reference = images(1), torch.arange(6).expand(2, -1)
    pool = build_pool([call(name, pool_ratio=ratio)], tokens, torch.rand(2, 36), reference)
    assert pool.sum(dim=1).tolist() == [size, size]


@given(
    seed=st.integers(0, 1000),
    names=st.lists(st.sampled_from(SIZED), min_size=1, max_size=3),
    ratio=st.sampled_from([0.25, 0.5, 1.0, 8.0]),
    k=st.integers(1, 35),
)
def test_a_pool_narrows_and_never_holds_a_reference_token(
    seed: int, names: list[str], ratio: float, k: int
) -> None:
    tokens = images(seed)
    source = torch.Generator().manual_seed(seed)
    g = torch.rand(2, 36, generator=source)
    reference = torch.rand(2, 36, generator=source).argsort(dim=1)[:, :k]
    wider = ~mask_from_indices(reference, 36)
    calls = [call(name, pool_ratio=ratio) for name in names]
    for count in range(1, len(calls) + 1):
        pool = build_pool(calls[:count], tokens, g, reference)
        assert not (pool & ~wider).any() and pool.any(dim=1).all()
        wider = pool


@means("spatial_coverage_pool_builder")
def test_coverage_takes_the_best_of_each_cell_without_a_reference_token() -> None:
    # Two by two cells of two by two tokens; token 0 is in the reference, and so is its cell.
    g = torch.tensor(
        [[0.9, 0.9, 0.1, 0.2, 0.9, 0.9, 0.4, 0.3, 0.5, 0.6, 0.0, 0.0, 0.8, 0.7, 0.0, 0.0]]
    )
    tokens, coverage = (
        plain(torch.eye(16), Grid(4, 4)),
        call("spatial_coverage_pool_builder", cells=2),
    )
    # The last cell is all alike: the first of its tokens.
    assert positions(build_pool([coverage], tokens, g, torch.tensor([[0]]))) == [[6, 10, 12]]
    assert positions(build_pool([coverage], tokens, g, torch.tensor([[0, 2, 8, 15]]))) == [[]]


@means("multi_source_pool_builder")
def test_sources_take_turns_until_the_pool_is_full() -> None:
    angles = torch.tensor([0.0, 5.0, 10.0, 180.0, 90.0, 15.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1))
    g, reference = torch.tensor([[0.0, 0.9, 0.8, 0.1, 0.2, 0.7]]), torch.tensor([[0]])

    def joined(ratio: float) -> list[list[int]]:
        # By quality 1, 2, 5, ...; by diversity 3, 4, ...
        sources = [
            {"atom": "quality_pool_builder", "pool_ratio": 8.0},
            {"atom": "diversity_pool_builder", "pool_ratio": 2.0},
        ]
        pool = call("multi_source_pool_builder", pool_ratio=ratio, sources=sources)
        return positions(build_pool([pool], tokens, g, reference))

    assert [joined(r) for r in (1.0, 2.0, 3.0, 4.0, 5.0)] == [
        [[1]],
        [[1, 3]],
        [[1, 2, 3]],
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5]],
    ]


def test_a_source_is_no_joined_pool_itself() -> None:
    with pytest.raises(ValueError, match="multi_source_pool_builder"):
        call("multi_source_pool_builder", sources=[{"atom": "multi_source_pool_builder"}])
