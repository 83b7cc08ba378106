"""Split of an image's budget, core and exchange quota over the regions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_autoprune.serving.shared.plan import ItemPlan
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tiles import split_over_tiles
from vllm_autoprune.tpdsl.tokens import Grid


class SizedRegion(Protocol):
    """Region of an image: its tokens, and how many tiles of the vision tower it is."""

    @property
    def grid(self) -> Grid:
        """Grid of its tokens."""

    @property
    def share(self) -> int:
        """Number of tiles; the budget is split over regions in proportion to it."""


@dataclass(frozen=True, slots=True)
class RegionShare:
    """What one region has of an image's K tokens: the core and the quota among them.

    rows are those that the item keeps of it, as :attr:`ItemPlan.part` says; ``before`` those that
    earlier items do.
    """

    budget: int
    core: int
    quota: int
    rows: int
    before: int = 0

    def policy(self, whole: PruningPolicy) -> PruningPolicy:
        """The policy of the image, for this region."""
        # The image's r_min is at most K - q_e, which is what these add up to.
        r_min = min(whole.r_min, self.budget - self.quota)
        return replace(
            whole, budget=self.budget, quota=self.quota, r_min=r_min, varies=False, core=self.core
        )


def share_over_regions(
    plan: ItemPlan, policy: PruningPolicy | None, regions: Sequence[SizedRegion]
) -> list[RegionShare]:
    """The share of every region; a core is split like the K that it is part of."""
    core, quota = (0, 0) if policy is None else (policy.core, policy.quota)
    shares = []
    for tokens, before, kept, exchanged in zip(
        split_over_regions(plan.image_budget, regions),
        split_over_regions(plan.kept_before, regions),
        split_over_regions(core, regions),
        split_over_regions(quota, regions),
        strict=True,
    ):
        rows = tokens - before
        # The policy of a delta is that of both parts, the policy of a recall its own alone.
        budget = rows if plan.part == "recall" else tokens
        shares.append(RegionShare(budget, kept, min(exchanged, budget - kept), rows, before))
    return shares


def split_over_regions(budget: int, regions: Sequence[SizedRegion]) -> tuple[int, ...]:
    """Split K over regions: K / T for each of their tiles, the first tiles taking the remainder.

    Surplus goes to the next region with room. If K is at least the number of tokens, every region
    keeps all of its tokens.
    """
    tiles = split_over_tiles(budget, sum(region.share for region in regions))
    wanted, first = [], 0
    for region in regions:
        wanted.append(sum(tiles[first : first + region.share]))
        first += region.share
    room = [region.grid.tokens for region in regions]
    budgets = [min(one, size) for one, size in zip(wanted, room, strict=True)]
    left = min(budget, sum(room)) - sum(budgets)
    for i, size in enumerate(room):
        more = min(left, size - budgets[i])
        budgets[i] += more
        left -= more
    return tuple(budgets)
