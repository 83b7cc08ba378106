from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, images, plain
from vllm_autoprune import Grid
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import PoolCall, SizedPool, build_pool
from vllm_autoprune.tpdsl.registry import ATOMS

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


@pytest.mark.parametrize("name", ATOMS.of_kind("candidate_pool", PoolCall))
def test_nan_in_one_image_stays_there_and_keeps_the_reference_out(name: str) -> None:
    clean, tokens = images(2), images(2)
    tokens.features[1, 3] = torch.nan
    g, reference = torch.rand(2, 36), torch.arange(6).expand(2, -1)
    pool = build_pool([call(name)], tokens, g, reference)
    assert torch.equal(pool[0], build_pool([call(name)], clean, g, reference)[0])
    assert not pool[:, :6].any()


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


def test_coverage_after_another_builder_sees_what_that_left() -> None:
    g = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]])
    tokens = plain(torch.eye(8), Grid(2, 4))
    wide, coverage = (
        call("quality_pool_builder", pool_ratio=3.0),
        call("spatial_coverage_pool_builder", cells=2),
    )
    # Cells are columns 0-1 and 2-3 of each row; quality leaves tokens 1, 2 and 3.
    assert positions(build_pool([wide, coverage], tokens, g, torch.tensor([[0]]))) == [[2]]


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


def test_a_joined_pool_narrows_what_follows_it_like_any_other() -> None:
    g = torch.tensor([[0.0, 0.9, 0.8, 0.7]])
    first, then = call("multi_source_pool_builder", pool_ratio=2.0), call("quality_pool_builder")
    tokens = plain(torch.eye(4), Grid(2, 2))
    reference = torch.tensor([[0]])
    both = build_pool([first, then], tokens, g, reference)
    assert positions(both) == [[1]] and bool(
        (build_pool([first], tokens, g, reference) | ~both).all()
    )


def test_a_source_is_no_joined_pool_itself() -> None:
    with pytest.raises(ValueError, match="multi_source_pool_builder"):
        call("multi_source_pool_builder", sources=[{"atom": "multi_source_pool_builder"}])
