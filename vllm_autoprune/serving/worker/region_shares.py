"""Split of an image's budget, core and exchange quota over the regions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_autoprune.serving.shared.part_shares import split_over_parts
from vllm_autoprune.serving.shared.plan import ItemPlan
from vllm_autoprune.tpdsl.materialize import PruningPolicy
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
    """One region's part of an image's budget K, core size and exchange quota.

    ``rows`` is how many of the region's tokens the item keeps (:attr:`ItemPlan.part`), ``before``
    how many the items before it keep.
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
    plan: ItemPlan, policy: PruningPolicy | None, regions: Sequence[SizedRegion], first: int = 0
) -> list[RegionShare]:
    """The share of every region; a core is split like the K that it is part of.

    Region number ``first`` takes what does not divide.
    """
    core, quota = (0, 0) if policy is None else (policy.core, policy.quota)
    shares = []
    for tokens, before, kept, exchanged in zip(
        split_over_regions(plan.image_budget, regions, first),
        split_over_regions(plan.kept_before, regions, first),
        split_over_regions(core, regions, first),
        split_over_regions(quota, regions, first),
        strict=True,
    ):
        rows = tokens - before
        # The policy of a delta is that of both parts, the policy of a recall its own alone.
        budget = rows if plan.part == "recall" else tokens
        shares.append(RegionShare(budget, kept, min(exchanged, budget - kept), rows, before))
    return shares


def split_over_regions(
    budget: int, regions: Sequence[SizedRegion], first: int = 0
) -> tuple[int, ...]:
    """Split K over regions by their shares: :func:`split_over_parts`."""
    sizes = [region.grid.tokens for region in regions]
    return split_over_parts(budget, sizes, [region.share for region in regions], first)
