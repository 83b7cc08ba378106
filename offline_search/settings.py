"""Settings of one search: the first record of its ledger, fixed for the whole search."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS, BudgetCall, RatioBudget
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.registry import default_call

Objective = Literal["quality", "mme"]
"""What is maximized: log-probability of the reference answers, or MME's total in its place."""

Library = Literal["searched", "paper"]
"""Atoms that a language model is offered: those of the searched components, extensions among them;
or all 131 of the paper, with source, budget, safety checks and r_min, and no extension."""

Space = Literal[
    "all", "numbers", "released", "without-diversity", "without-fusion", "without-anchoring"
]
"""What candidates may be: any state, or the released policy with some of its parts searched
(:mod:`offline_search.search_space`)."""

MAX_QUOTA = 640
"""Largest q_e that the language allows; a selector cuts it to K."""

STRATEGIES_WITH_LISTS = ("autoprune", "autoprune+")
"""Strategies that may ask a language model for several proposals at once."""

DEFAULT_LIST = 5
"""Proposals in a reply of a model behind an endpoint: one for each purpose."""


class Settings(FrozenModel):
    """Settings of one search; equal settings, replies and evaluations give equal ledgers."""

    strategy: str = Field(default="autoprune+", description="name of the search strategy")
    rounds: int = Field(default=10, ge=1, le=10_000, description="T, rounds of proposals")
    per_round: int = Field(default=5, ge=1, le=1000, description="m, candidates a round")
    base_policy: str = Field(
        default="cdpruner", description="pi_P, the base policy of every candidate"
    )
    other_bases: tuple[str, ...] = Field(
        default=(), description="base policies that candidates may have instead"
    )
    budgets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_BUDGET)], ...], Field(min_length=1)
    ] = Field(
        default=(32,),
        description="K_0, tokens kept; with several, every candidate is measured at each",
    )
    objective: Objective = Field(default="quality", description="what is maximized")
    space: Space = Field(default="all", description="what candidates may be")
    core: bool = Field(
        default=False, description="whether candidates may split K into a core and a delta"
    )
    library: Library = Field(
        default="searched", description="atoms that a language model is offered"
    )
    rank_at: bool = Field(
        default=False, description="whether candidates may rank tokens before the patch merger"
    )
    race: bool = Field(
        default=False, description="whether candidates are dropped after a part of the examples"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of all random choices")
    equal_evaluations: bool = Field(
        default=False, description="go on past T rounds until T x m full evaluations are spent"
    )
    confirmed: int = Field(
        default=5, ge=1, le=50, description="best candidates to measure on validation"
    )
    proposer: str = Field(default="", description="model that proposes; empty: none")
    proposals_per_reply: int = Field(
        default=1,
        ge=1,
        le=20,
        description="proposals that a language model writes at once, each with a hypothesis",
    )
    temperature: float = Field(
        default=1.0, ge=0.0, le=2.0, description="sampling temperature of the proposer"
    )
    reply_tokens: int = Field(
        default=1024, ge=64, le=32768, description="maximum tokens of a proposal"
    )
    evaluator: str = Field(default="", description="model and data that candidates are measured on")

    @model_validator(mode="after")
    def _require_different_budgets(self) -> Settings:
        if len(set(self.budgets)) < len(self.budgets):
            raise ValueError("a budget is given twice: leave one out")
        return self

    @model_validator(mode="after")
    def _require_writer_of_lists(self) -> Settings:
        writes = self.proposer and self.strategy in STRATEGIES_WITH_LISTS
        if self.proposals_per_reply > 1 and not writes:
            names = " and ".join(STRATEGIES_WITH_LISTS)
            raise ValueError(f"only {names} ask for lists, of a language model")
        return self

    @model_validator(mode="after")
    def _require_states_of_bases(self) -> Settings:
        if self.strategy.endswith("-code") and (self.other_bases or self.space != "all"):
            what = "a base policy" if self.other_bases else "a space"
            raise ValueError(f"only a state has {what}, and no program: leave others out")
        return self

    @model_validator(mode="after")
    def _require_space_of_its_own(self) -> Settings:
        if self.space != "all" and self.library == "paper":
            raise ValueError(f"the space {self.space} has atoms of its own: leave others out")
        if self.space == "without-anchoring" and max(self.budgets) > MAX_QUOTA:
            what = f"anchoring cannot be removed above K = {MAX_QUOTA}, the largest q_e"
            raise ValueError(f"{what}: give a smaller K")
        return self

    @property
    def bases(self) -> tuple[str, ...]:
        """Base policies to choose from, the search's own first; empty if there is no choice."""
        names = dict.fromkeys((self.base_policy, *self.other_bases))
        return tuple(names) if self.other_bases else ()

    @property
    def source_budget(self) -> int:
        """K_0: the first budget, which is written into the candidates' states."""
        return self.budgets[0]

    @property
    def total_candidates(self) -> int:
        """T x m: the evaluation budget, in evaluations of the whole search split."""
        return self.rounds * self.per_round


def budget_call(budget: int) -> BudgetCall:
    """The budget atom that keeps exactly K tokens."""
    if budget in FIXED_BUDGETS:
        return default_call(BudgetCall, f"fixed_budget@{budget}")
    # No fixed-budget atom has this K: equal floor and ceiling, as `transfer` writes it.
    return RatioBudget.model_validate(
        {"atom": "ratio_budget", "ratio": 1.0, "floor": budget, "ceiling": budget}
    )
