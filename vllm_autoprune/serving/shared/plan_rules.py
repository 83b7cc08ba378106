"""Checks of plans against the rules of the server.

The server's own API makes only plans that its rules allow. But vLLM's ``/inference/v1/generate``
takes processed inputs, plans among them, from its client. They are checked twice: the API server
refuses a request with a plan that is not allowed; the worker, which must survive any input,
replaces the plan (``worker.plan_reader``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from pydantic import ValidationError

from vllm_autoprune.errors import BudgetError, StateError
from vllm_autoprune.serving.shared.plan import ItemPlan, plan_error
from vllm_autoprune.serving.shared.request_rules import FLAG
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.shared.state_codec import MAX_CACHED_STATES, decode_state, encode_state
from vllm_autoprune.tpdsl.cost import require_affordable
from vllm_autoprune.tpdsl.loading import load_state, shipped_states


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules for plans: those of the served state, and the language model's vocabulary size."""

    served: ServedState
    vocabulary: int

    def check(self, plan: ItemPlan, placeholders: int) -> None:
        """Raise :class:`RequestError` unless a request with this plan may be served.

        ``placeholders`` is the number of rows that the prompt has room for.
        """
        if plan.profile:
            raise plan_error("is one of memory profiling")
        if plan.budget != placeholders:
            raise plan_error(f"keeps K = {plan.budget} tokens for {placeholders} placeholders")
        self.check_budget(plan)
        self.check_token_ids(plan)
        self.check_choice(plan)

    def check_budget(self, plan: ItemPlan) -> None:
        """Raise if the plan keeps more tokens than the server's state and rules allow."""
        rules = self.served.rules
        most = max(self.served.budget, rules.detail.largest)
        if rules.allows("budget"):
            most = max(most, rules.maximum)
        first, *recalled = [*(choice.budget for choice in plan.earlier), plan.budget]
        if plan.part == "delta":
            first = plan.image_budget
        if first > most:
            raise plan_error(f"keeps K = {first} tokens, and requests may keep {most}")
        more = max(rules.recall, rules.maximum if rules.allows("budget") else 0)
        if max(recalled, default=0) > more:
            raise plan_error(f"recalls {max(recalled)} tokens, and requests may recall {more}")

    def check_token_ids(self, plan: ItemPlan) -> None:
        """Raise for token ids beyond a vocabulary: looking them up would crash the worker."""
        tower = self.served.tower
        size = self.vocabulary if tower is None else tower.vocabulary
        read = [(plan.instruction, plan.language)]
        for instruction, language in read + [(c.instruction, c.language) for c in plan.earlier]:
            if max(instruction, default=0) >= size:
                raise plan_error(f"has a token id for relevance beyond the vocabulary of {size}")
            if max(language, default=0) >= self.vocabulary:
                raise plan_error(f"has a token id beyond the vocabulary of {self.vocabulary}")

    def check_choice(self, plan: ItemPlan) -> None:
        """Raise if requests may not set the plan's chooser or state."""
        served = self.served
        if plan.keep != "state" and not served.rules.allows("budget"):
            raise plan_error(f"has keep = {plan.keep!r}, and requests may set nothing ({FLAG})")
        if plan.state and (problem := _state_problem(served, plan.state)):
            raise plan_error(f"carries a state that {problem}")
        if plan.part != "whole":
            self._check_part(plan)
        if not plan.state:
            return
        if missing := served.policy_for_plan(plan).needs - served.needs:
            raise plan_error(f"carries a state that reads {', '.join(sorted(missing))}")

    def _check_part(self, plan: ItemPlan) -> None:
        """Raise for a part of an image that the state does not allow."""
        if plan.keep == "resized":
            raise plan_error("is a part of an image that is resized")
        if plan.keep == "random":
            if plan.core:
                raise plan_error("is a part of an image whose tokens are drawn at random")
            return
        try:
            for one in (plan, *plan.items_before()):
                self.served.policy_for_plan(one)
        except BudgetError as error:
            raise plan_error(f"is a part of an image: {error}") from None


@lru_cache(maxsize=MAX_CACHED_STATES)
def _state_problem(served: ServedState, text: bytes) -> str:
    """Why a server refuses the state in a plan; empty where it accepts it."""
    rules = served.rules
    if not rules.allows("shipped-states"):
        return f"requests may not bring: they may set {rules} ({FLAG})"
    if not rules.allows("states") and text not in _shipped():
        return f"does not ship, and requests may only name those that do ({FLAG})"
    try:
        state = decode_state(text)
        if encode_state(state) != text:
            return "is not in its canonical form"
        require_affordable(state, rules.cost)
    except (ValidationError, StateError) as error:
        return f"cannot be served: {str(error)[:400]}"
    return ""


@cache
def _shipped() -> frozenset[bytes]:
    """The states that requests may name, as plans carry them; each alone and without exchange."""
    states = [load_state(file) for file in shipped_states().values()]
    return frozenset(encode_state(s) for state in states for s in (state, state.without_exchange()))
