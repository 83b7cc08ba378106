from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.worker.region_shares import split_over_regions
from vllm_autoprune.tpdsl.tokens import Grid


@dataclass(frozen=True)
class Region:
    grid: Grid
    share: int


def test_every_tile_counts_the_same() -> None:
    base, crops = Region(Grid(4, 4), 1), Region(Grid(6, 8), 4)
    assert split_over_regions(10, [base, crops]) == (2, 8)
    assert split_over_regions(11, [base, crops]) == (3, 8)
    assert split_over_regions(1, [base, crops]) == (1, 0)


def test_surplus_goes_to_regions_with_room() -> None:
    base, crops = Region(Grid(4, 4), 1), Region(Grid(2, 3), 4)
    assert split_over_regions(20, [base, crops]) == (14, 6)
    assert split_over_regions(100, [base, crops]) == (16, 6)


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)), min_size=1),
)
def test_the_parts_add_up(budget: int, shapes: list[tuple[int, int, int]]) -> None:
    regions = [Region(Grid(h, w), share) for h, w, share in shapes]
    shares = split_over_regions(budget, regions)
    room = [region.grid.tokens for region in regions]
    assert sum(shares) == min(budget, sum(room))
    assert all(0 <= share <= size for share, size in zip(shares, room, strict=True))
