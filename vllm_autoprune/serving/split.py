"""How an image's budget is split over its regions, where it has several.

Knows nothing about what is chosen within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_autoprune.tpdsl.tiles import split_over_tiles
from vllm_autoprune.tpdsl.tokens import Grid


class Sized(Protocol):
    """What a region is to a budget: its tokens, and its share in tiles of the vision tower."""

    @property
    def grid(self) -> Grid:
        """Where its tokens lie."""

    @property
    def share(self) -> int:
        """Tiles that it stands for."""


def split_over_regions(budget: int, regions: Sequence[Sized]) -> tuple[int, ...]:
    """K over regions: K / T for every tile a region stands for, the first tiles taking the rest.

    What does not fit into a region goes to the next that has room. Where K is at least the
    number of tokens, every region gets all of its own.
    """
    tiles = split_over_tiles(budget, sum(region.share for region in regions))
    wanted, first = [], 0
    for region in regions:
        wanted.append(sum(tiles[first : first + region.share]))
        first += region.share
    room = [region.grid.tokens for region in regions]
    given = [min(one, size) for one, size in zip(wanted, room, strict=True)]
    left = min(budget, sum(room)) - sum(given)
    for i, size in enumerate(room):
        more = min(left, size - given[i])
        given[i] += more
        left -= more
    return tuple(given)
