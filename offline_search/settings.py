"""What a search is asked to do: written first into its ledger, and never changed after.

Knows nothing about how any of it is done.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offline_search.ablation import Component
from vllm_autoprune.tpdsl.atoms.budget import FIXED_BUDGETS, BudgetCall, RatioBudget
from vllm_autoprune.tpdsl.registry import default_call

Across = Literal["mean", "worst"]
"""How the objectives of several budgets become one: their mean, or the least of them."""


Objective = Literal["quality", "budgets", "tasks", "latency"]
"""What is aimed at: the one figure, each budget's, each category's, the time of a selection."""


UNLISTED = ("openevolve", "random", "tpe")
"""Strategies whose proposals are held to no menu: programs, and states that no model writes."""

SMALL_MENU = 1
"""Atoms offered for what a proposal changes, where a small model would repeat what it is shown.

One: between three it chooses by their names, and takes the same few throughout.
"""


class Frozen(BaseModel):
    """Base of everything that a ledger holds: frozen, and nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Settings(Frozen):
    """One search. Two runs with equal settings, replies and evaluations make equal ledgers."""

    strategy: str = Field(default="autoprune+", description="who proposes states")
    rounds: int = Field(default=10, ge=1, le=10_000, description="T, rounds of proposals")
    per_round: int = Field(default=5, ge=1, le=1000, description="m, candidates a round")
    base_policy: str = Field(default="cdpruner", description="pi_P, which every candidate modifies")
    budgets: Annotated[tuple[int, ...], Field(min_length=1)] = Field(
        default=(32,),
        description="K_0, tokens kept; with several, every candidate is measured at each",
    )
    across: Across = Field(default="mean", description="how several budgets become one objective")
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)] = Field(
        default=("quality",), description="with several, candidates are held against a Pareto front"
    )
    without: tuple[Component, ...] = Field(
        default=(), description="components that no candidate has: an ablation"
    )
    quota: int | None = Field(default=None, ge=0, le=640, description="q_e of every candidate")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of everything that is drawn")
    equal_evaluations: bool = Field(
        default=False, description="go on past T rounds until T x m full evaluations are spent"
    )
    confirmed: int = Field(default=5, ge=1, le=50, description="candidates that are measured again")
    proposer: str = Field(default="", description="model that proposes; empty: none")
    menu: int = Field(
        default=0, ge=0, le=100, description="atoms offered for what a proposal changes; 0: all"
    )
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="of the proposer")
    reply_tokens: int = Field(
        default=1024, ge=64, le=32768, description="longest reply of the proposer"
    )
    evaluator: str = Field(
        default="", description="what candidates are measured on: model and data"
    )

    @model_validator(mode="after")
    def _aims_at_answers(self) -> Settings:
        if set(self.objectives) == {"latency"}:
            raise ValueError("latency alone is best with no policy at all: add quality")
        return self

    @model_validator(mode="after")
    def _menu_is_read(self) -> Settings:
        if self.menu and (not self.proposer or self.strategy in UNLISTED):
            raise ValueError("a menu is for a language model that writes states: leave it out")
        return self

    @property
    def several(self) -> bool:
        """Whether there is more than the one figure to aim at."""
        return set(self.objectives) != {"quality"}

    @property
    def source_budget(self) -> int:
        """K_0, the budget that a candidate's own state names."""
        return self.budgets[0]

    @property
    def candidates(self) -> int:
        """T x m: what the search may spend, in evaluations of the whole search split."""
        return self.rounds * self.per_round


def budget_call(budget: int) -> BudgetCall:
    """The budget atom that keeps exactly K tokens."""
    if budget in FIXED_BUDGETS:
        return default_call(BudgetCall, f"fixed_budget@{budget}")
    # No fixed budget of the language: floor and ceiling in one, as `transfer` writes it.
    return RatioBudget.model_validate(
        {"atom": "ratio_budget", "ratio": 1.0, "floor": budget, "ceiling": budget}
    )
