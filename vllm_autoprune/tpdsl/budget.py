"""Budget atoms (B): how many visual tokens an image keeps.

Knows nothing about which tokens.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_autoprune.tpdsl.atom import AtomCall, OneOf, declare

FIXED_BUDGETS = (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
"""The ten values of K that the paper's language holds."""


class BudgetCall(AtomCall):
    """A budget atom, with the limit an operator may set for flags and requests."""

    limit: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="largest K that a flag or a request may ask for; null: no limit",
    )


def fixed_budget(call: AtomCall) -> int:
    """Keep exactly K tokens, split evenly over tiles, earlier tiles taking the remainder."""
    return int(call.atom.removeprefix("fixed_budget@"))


for _k in FIXED_BUDGETS:
    declare(
        f"fixed_budget@{_k}",
        "budget_control",
        BudgetCall,
        fixed_budget,
        doc=f"Keep exactly K = {_k} tokens, split evenly over tiles, the first taking the rest.",
    )

Budget = Annotated[BudgetCall, OneOf("budget_control")]


def split_over_tiles(budget: int, tiles: int) -> tuple[int, ...]:
    """K over T tiles: ``K // T`` each, the first ``K % T`` tiles one more."""
    share, rest = divmod(budget, tiles)
    return tuple(share + (tile < rest) for tile in range(tiles))
