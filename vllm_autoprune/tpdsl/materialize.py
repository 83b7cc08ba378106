"""Materialize: a state at a budget becomes an executable policy.

Knows nothing about models; only the budget and what follows from it are resolved here.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_autoprune.errors import BudgetError, Problem
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicy
from vllm_autoprune.tpdsl.constraints import resolve_constraints
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

MAX_BUDGET = 65536


@dataclass(frozen=True, slots=True)
class PruningPolicy:
    """pi_alpha^(K): a state with every budget-dependent field resolved (equation 6)."""

    state: PruningState
    budget: int
    quota: int
    r_min: int

    @property
    def base(self) -> BasePolicy:
        """The base policy that the residual modifies."""
        return BASE_POLICIES[self.state.base_policy.name]

    @property
    def refines(self) -> bool:
        """False where no exchange is possible: the policy is then its base policy."""
        return self.quota > 0

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that cost something and that this policy reads."""
        return inputs_read(self.state, exchange=self.refines)

    @property
    def reads_instruction(self) -> bool:
        """True where two questions on one image may keep different tokens."""
        return not self.needs.isdisjoint({"instruction", "language"})

    @property
    def falls_back(self) -> bool:
        """True where an invalid policy may serve its base policy's selection instead."""
        return any(call.atom == "fallback_to_selection" for call in self.state.safety)

    def tokens_kept(self, tokens: int) -> int:
        """K of an image of N tokens: known before any model runs."""
        return min(self.budget, tokens)


def inputs_read(state: PruningState, *, exchange: bool) -> frozenset[Need]:
    """Inputs that cost something and that a state reads, with or without its exchange."""
    found = set(BASE_POLICIES[state.base_policy.name].needs)
    if exchange:
        for call in state.scoring.signals:
            if call.weight > 0:
                found |= ATOMS.of(call).needs
    return frozenset(found)


def materialize(state: PruningState, budget: int | None = None) -> PruningPolicy:
    """The policy of a state at its own budget, or at another one without a new search.

    Only budget-dependent fields change: K, and r_min = K - q_e where the state leaves r_min
    open. Raises :class:`BudgetError` where the state does not allow the budget.
    """
    function = ATOMS.of(state.budget).function
    own = function(state.budget)
    assert isinstance(own, int)
    wanted = own if budget is None else budget
    problems = _objections(state, wanted)
    if problems:
        raise BudgetError(f"budget of state {state.name!r}", problems)
    quota, r_min = resolve_constraints(state.constraints.selector, wanted)
    return PruningPolicy(state=state, budget=wanted, quota=quota, r_min=r_min)


def _objections(state: PruningState, budget: int) -> list[Problem]:
    problems = []
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= MAX_BUDGET:
        what = f"K = {budget!r} is not a number of tokens"
        return [Problem("/budget", what, f"give a whole number from 1 to {MAX_BUDGET}")]
    limit = state.budget.limit
    if limit is not None and budget > limit:
        what = f"K = {budget} is above what the state allows"
        problems.append(Problem("/budget/limit", what, f"ask for {limit} or less"))
    r_min = state.constraints.selector.r_min
    if r_min is not None and r_min > budget:
        what = f"r_min = {r_min} reference tokens cannot be kept of K = {budget}"
        mend = "set it to null, which means K - q_e, or ask for a larger K"
        problems.append(Problem("/constraints/selector/r_min", what, mend))
    return problems
