"""Budget atoms (B): the number K of visual tokens that an image keeps.

K follows from N and the number of tiles in exact arithmetic, so every process computes the same K
before any model runs.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from pydantic import Field

from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, OneOf, atom, declare

FIXED_BUDGETS = (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
"""The ten values of K in the paper's language."""


class BudgetCall(AtomCall):
    """Parameters of every budget atom: the largest K that flags and requests may ask for."""

    limit: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="largest K that a flag or a request may ask for; null: no limit",
    )

    def range(self) -> tuple[int, int]:
        """Smallest and largest K of any image."""
        return fixed_budget(self, 0, 1), fixed_budget(self, 0, 1)


class RatioBudget(BudgetCall):
    """Parameters of ratio_budget."""

    ratio: float = Field(
        0.1, ge=0.01, le=1.0, description="share of an image's tokens that is kept"
    )
    floor: int = Field(16, ge=1, le=65536, description="smallest K")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K")

    def range(self) -> tuple[int, int]:
        """Floor and ceiling; a floor above the ceiling is cut to it."""
        return min(self.floor, self.ceiling), self.ceiling


class TileBudget(BudgetCall):
    """Parameters of per_tile_budget."""

    k: int = Field(32, ge=1, le=65536, description="tokens kept per tile")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K of an image")

    def range(self) -> tuple[int, int]:
        """K of a one-tile image, and the ceiling."""
        return min(self.k, self.ceiling), self.ceiling


def fixed_budget(call: BudgetCall, tokens: int, tiles: int) -> int:
    """Keep exactly K tokens, or all of an image that has fewer."""
    return int(call.atom.removeprefix("fixed_budget@"))


for _k in FIXED_BUDGETS:
    declare(
        f"fixed_budget@{_k}",
        "budget_control",
        BudgetCall,
        fixed_budget,
        doc=f"Keep exactly K = {_k} tokens of an image, or all where it has fewer.",
    )


@atom("budget_control", RatioBudget, origin="extension")
def ratio_budget(call: RatioBudget, tokens: int, tiles: int) -> int:
    """Keep a fixed share of an image's tokens, rounded down and clamped to floor and ceiling."""
    # repr() gives the decimal as written: 0.3 of 10 tokens is 3, not 2.
    share = Fraction(repr(call.ratio)) * tokens
    return min(call.ceiling, max(call.floor, int(share)))


@atom("budget_control", TileBudget, origin="extension")
def per_tile_budget(call: TileBudget, tokens: int, tiles: int) -> int:
    """Keep k tokens per tile of an image, at most the ceiling in all."""
    return min(call.ceiling, call.k * tiles)


Budget = Annotated[BudgetCall, OneOf("budget_control", BudgetCall)]


def run_budget(call: BudgetCall, tokens: int, tiles: int = 1) -> int:
    """K of an image of N tokens in T tiles; may exceed N."""
    budget = ATOMS.of(call).function(call, tokens, tiles)
    assert isinstance(budget, int)
    return budget
