"""ServedState: the immutable state and settings of a server, pickled to every process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

from vllm_autoprune.serving.compat import get_attachment
from vllm_autoprune.serving.shared.plan import Chooser, ItemPlan
from vllm_autoprune.serving.shared.request_rules import DEFAULT_RULES, RequestRules
from vllm_autoprune.serving.shared.state_codec import decode_state
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.tpdsl.atoms.selectors import resolve_constraints
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import (
    MAX_BUDGET,
    PruningPolicy,
    core_policy,
    materialize,
    recall_policy,
)
from vllm_autoprune.tpdsl.state import PruningState, required_inputs
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ATTRIBUTE = "autoprune"

UnavailableInputs = tuple[tuple[Need, str], ...]
"""Inputs that this server cannot provide, each with the reason."""


@dataclass(frozen=True)
class ServedState:
    """The state that a server runs, with its default budget, text tower and request rules.

    ``follows`` is true if K depends on the image size; ``budget`` is then the largest K. ``rules``
    are the permissions of requests; ``unavailable`` are inputs that request states cannot read.
    """

    architecture: str
    state: PruningState
    budget: int
    tower: TextTower | None
    cache_bytes: int
    budget_varies: bool = False
    rules: RequestRules = DEFAULT_RULES
    unavailable: UnavailableInputs = ()

    def policy(self, budget: int | None = None, keep: Chooser = "state") -> PruningPolicy:
        """The policy at the server's budget, or at a request's; raises BudgetError."""
        if budget is None and not self.budget_varies:
            budget = self.budget
        return make_policy(self.state, budget, keep)

    def state_for_plan(self, plan: ItemPlan) -> PruningState:
        """The state in a plan, or the server's own."""
        return decode_state(plan.state) if plan.state else self.state

    def policy_for_plan(self, plan: ItemPlan) -> PruningPolicy:
        """Policy of a plan: of the state in the plan, or of the server's own.

        For a core it is the one that keeps the core alone, for a delta that of both parts, for a
        recall the one that chooses its tokens. Raises BudgetError.
        """
        state = self.state_for_plan(plan)
        if plan.part == "recall":
            return recall_policy(_chosen_state(state, plan.keep), plan.budget)
        if plan.part == "whole":
            return make_policy(state, plan.budget, plan.keep)
        if plan.part == "core":
            return core_policy(state, plan.core)
        return make_policy(state, plan.image_budget, plan.keep, plan.core)

    def selection_identity(self, state: PruningState) -> str:
        """Identity of the selection: everything it depends on except image, K and instruction."""
        tower = "" if self.tower is None else f"|{self.tower.path}|{self.tower.sign}"
        return state.digest + tower

    @property
    def splits(self) -> bool:
        """Whether any request may have an image's tokens split into core and delta."""
        return self.state.core is not None or self.rules.allows("shipped-states")

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that any request may make the workers read: quotas grow with K.

        If requests may bring states, these are all available inputs: features are computed once per
        image, before it is known which inputs later states read.
        """
        quota, _ = resolve_constraints(self.state.constraints.selector, MAX_BUDGET)
        own = required_inputs(self.state, exchange=quota > 0)
        if not self.rules.allows("shipped-states"):
            return own
        return own | (frozenset(NEEDS) - {need for need, _ in self.unavailable})

    def __reduce__(self) -> tuple[object, ...]:
        # As text, because parameter models are made from the registry and have no import path.
        rest = (
            self.budget,
            self.tower,
            self.cache_bytes,
            self.budget_varies,
            self.rules,
            self.unavailable,
        )
        return _revive, (self.architecture, self.state.dumps(), *rest)


NEEDS: tuple[Need, ...] = get_args(Need)


def _revive(
    architecture: str,
    text: str,
    budget: int,
    tower: TextTower | None,
    cache_bytes: int,
    budget_varies: bool,
    rules: RequestRules,
    unavailable: UnavailableInputs,
) -> ServedState:
    state = load_state(text)
    return ServedState(
        architecture, state, budget, tower, cache_bytes, budget_varies, rules, unavailable
    )


@lru_cache(maxsize=512)
def make_policy(
    state: PruningState, budget: int | None, keep: Chooser = "state", core: int | None = None
) -> PruningPolicy:
    """Policy of a state at a budget; without exchange if the plan keeps the reference."""
    return materialize(_chosen_state(state, keep), budget, core)


def _chosen_state(state: PruningState, keep: Chooser) -> PruningState:
    return state if keep == "state" else state.without_exchange()


def served_state(model_config: ModelConfig) -> ServedState | None:
    """The served state of a model config; None for a stock server."""
    served = get_attachment(model_config, ATTRIBUTE)
    assert served is None or isinstance(served, ServedState)
    return served
