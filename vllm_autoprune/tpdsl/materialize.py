"""Materialize: a state at a budget becomes an executable policy.

Knows nothing about models; only the budget and what follows from it are resolved here.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_autoprune.errors import BudgetError, Problem
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicy
from vllm_autoprune.tpdsl.budget import run_budget
from vllm_autoprune.tpdsl.constraints import resolve_constraints
from vllm_autoprune.tpdsl.reassembly import orders_by_quality
from vllm_autoprune.tpdsl.source import is_idle
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

MAX_BUDGET = 65536


@dataclass(frozen=True, slots=True)
class PruningPolicy:
    """pi_alpha^(K): a state with every budget-dependent field resolved (equation 6).

    ``varies`` where the state's budget follows from an image's size: budget is then the largest
    that any image gets, and :meth:`at` gives the policy of one size.
    """

    state: PruningState
    budget: int
    quota: int
    r_min: int
    varies: bool = False

    @property
    def base(self) -> BasePolicy:
        """The base policy that the residual modifies."""
        return BASE_POLICIES[self.state.base_policy.name]

    @property
    def refines(self) -> bool:
        """False where no exchange is possible: the policy is then its base policy."""
        return self.quota > 0

    @property
    def scores(self) -> bool:
        """True where token quality g is read, for the exchange or for the order of rows."""
        return self.refines or orders_by_quality(self.state.reassembly)

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

    def tokens_kept(self, tokens: int, tiles: int = 1) -> int:
        """K of an image of N tokens in T tiles: known before any model runs."""
        return min(self.at(tokens, tiles).budget, tokens)

    def at(self, tokens: int, tiles: int = 1) -> PruningPolicy:
        """The policy for images of N tokens in T tiles; itself where K does not depend on them."""
        if not self.varies:
            return self
        return materialize(self.state, run_budget(self.state.budget, tokens, tiles))


def inputs_read(state: PruningState, *, exchange: bool) -> frozenset[Need]:
    """Inputs that cost something and that a state reads, with or without its exchange."""
    found = set(BASE_POLICIES[state.base_policy.name].needs)
    read: list[AtomCall] = [state.reassembly]
    if exchange or orders_by_quality(state.reassembly):
        signals = [call for call in state.scoring.signals if call.weight > 0]
        priors = [call for call in state.source.priors if not is_idle(call)]
        read += [state.source.tokens, *signals, state.scoring.fusion, *priors]
    if exchange:
        constraints = state.constraints
        read += [state.scoring.kernel, *constraints.pool, constraints.selector]
    for call in read:
        found |= ATOMS.of(call).needs_of(call)
    return frozenset(found)


def materialize(state: PruningState, budget: int | None = None) -> PruningPolicy:
    """The policy of a state at its own budget, or at another one without a new search.

    Only budget-dependent fields change: K, and r_min = K - q_e where the state leaves r_min
    open. Raises :class:`BudgetError` where the state does not allow the budget.
    """
    least, most = state.budget.range() if budget is None else (budget, budget)
    problems = _objections(state, least, most)
    if problems:
        raise BudgetError(f"budget of state {state.name!r}", problems)
    quota, r_min = resolve_constraints(state.constraints.selector, most)
    varies = budget is None and least != most
    return PruningPolicy(state=state, budget=most, quota=quota, r_min=r_min, varies=varies)


def _objections(state: PruningState, least: int, most: int) -> list[Problem]:
    problems = []
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MAX_BUDGET:
        what = f"K = {most!r} is not a number of tokens"
        return [Problem("/budget", what, f"give a whole number from 1 to {MAX_BUDGET}")]
    limit = state.budget.limit
    if limit is not None and most > limit:
        what = f"K = {most} is above what the state allows"
        problems.append(Problem("/budget/limit", what, f"ask for {limit} or less"))
    r_min = state.constraints.selector.insists_on
    if r_min is not None and r_min > least:
        what = f"r_min = {r_min} reference tokens cannot be kept of K = {least}"
        mend = "set it to null, which means K - q_e, or ask for a larger K"
        problems.append(Problem("/constraints/selector/r_min", what, mend))
    return problems
