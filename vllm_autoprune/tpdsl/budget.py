"""Budget atoms (B): how many visual tokens an image keeps.

Knows nothing about which tokens. K is known before any model runs: from N and the number of tiles,
in whole numbers, so every process that asks gets the same.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from pydantic import Field

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom, declare

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

    def range(self) -> tuple[int, int]:
        """The smallest and the largest K that any image gets."""
        return fixed_budget(self, 0, 1), fixed_budget(self, 0, 1)


class RatioBudget(BudgetCall):
    """Parameters of ratio_budget."""

    ratio: float = Field(0.1, ge=0.01, le=1.0, description="share of an image's tokens")
    floor: int = Field(16, ge=1, le=65536, description="smallest K")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K")

    def range(self) -> tuple[int, int]:
        """Floor and ceiling; where they cross the ceiling holds."""
        return min(self.floor, self.ceiling), self.ceiling


class TileBudget(BudgetCall):
    """Parameters of per_tile_budget."""

    k: int = Field(32, ge=1, le=65536, description="tokens of one tile")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K of an image")

    def range(self) -> tuple[int, int]:
        """One tile's share, and the ceiling."""
        return min(self.k, self.ceiling), self.ceiling


def fixed_budget(call: BudgetCall, tokens: int, tiles: int) -> int:
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


@atom("budget_control", RatioBudget, origin="extension")
def ratio_budget(call: RatioBudget, tokens: int, tiles: int) -> int:
    """Keep a share of an image's tokens, rounded down, between floor and ceiling."""
    # The ratio as it is written, not as binary fractions have it: 0.3 of 10 tokens are 3.
    share = Fraction(repr(call.ratio)) * tokens
    return min(call.ceiling, max(call.floor, int(share)))


@atom("budget_control", TileBudget, origin="extension")
def per_tile_budget(call: TileBudget, tokens: int, tiles: int) -> int:
    """Keep k tokens for every tile of an image, up to a ceiling."""
    return min(call.ceiling, call.k * tiles)


Budget = Annotated[BudgetCall, OneOf("budget_control", BudgetCall)]


def run_budget(call: BudgetCall, tokens: int, tiles: int = 1) -> int:
    """K of an image of N tokens in T tiles; may exceed N."""
    budget = ATOMS.of(call).function(call, tokens, tiles)
    assert isinstance(budget, int)
    return budget


def split_over_tiles(budget: int, tiles: int) -> tuple[int, ...]:
    """K over T tiles: ``K // T`` each, the first ``K % T`` tiles one more."""
    share, rest = divmod(budget, tiles)
    return tuple(share + (tile < rest) for tile in range(tiles))
