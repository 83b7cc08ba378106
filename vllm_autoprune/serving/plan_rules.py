"""Plans against the rules of the server, whoever made them.

A server's own API makes only plans that its rules allow. But vLLM's ``/inference/v1/generate``
takes processed inputs, plans among them, from its client. They are looked at twice: the API server
refuses a request whose plan is not allowed, and the worker, which has to live whatever reaches it,
carries out another plan instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from pydantic import ValidationError
from torch import Tensor

from vllm_autoprune.errors import AutopruneError, StateError
from vllm_autoprune.serving.carried import KEPT, packed, unpacked
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan, plan_error
from vllm_autoprune.serving.prune import FallbackMeter
from vllm_autoprune.serving.rules import FLAG
from vllm_autoprune.serving.served import ServedState
from vllm_autoprune.tpdsl.executor.state_cost import require_affordable
from vllm_autoprune.tpdsl.states.load import load_state, shipped_states


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What plans of this server may hold: its state and rules, and the language model's words."""

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
        self.check_words(plan)
        self.check_choice(plan)

    def check_budget(self, plan: ItemPlan) -> None:
        """Raise where the plan keeps more tokens than the server's state and its rules allow."""
        rules, most = self.served.rules, self.served.budget
        if rules.allows("budget"):
            most = max(most, rules.most)
        if plan.budget > most:
            raise plan_error(f"keeps K = {plan.budget} tokens, and requests may keep {most}")

    def check_words(self, plan: ItemPlan) -> None:
        """Raise where a token id is beyond a vocabulary: to look it up would end the worker."""
        tower = self.served.tower
        said = self.vocabulary if tower is None else tower.vocabulary
        if max(plan.instruction, default=0) >= said:
            raise plan_error(f"has a token id for relevance beyond the vocabulary of {said}")
        if max(plan.language, default=0) >= self.vocabulary:
            raise plan_error(f"has a token id beyond the vocabulary of {self.vocabulary}")

    def check_choice(self, plan: ItemPlan) -> None:
        """Raise where requests may not choose who selects, or not by this state."""
        served = self.served
        if plan.keep != "state" and not served.rules.allows("budget"):
            raise plan_error(f"has keep = {plan.keep!r}, and requests may set nothing ({FLAG})")
        if not plan.state:
            return
        if problem := _state_problem(served, plan.state):
            raise plan_error(f"carries a state that {problem}")
        if missing := served.planned(plan).needs - served.needs:
            raise plan_error(f"carries a state that reads {', '.join(sorted(missing))}")


@lru_cache(maxsize=KEPT)
def _state_problem(served: ServedState, text: bytes) -> str:
    """Why a server does not run a state that a plan carries; empty where it does."""
    rules = served.rules
    if not rules.allows("policies"):
        return f"requests may not bring: they may set {rules} ({FLAG})"
    if not rules.allows("states") and text not in _shipped():
        return f"does not ship, and requests may only name those that do ({FLAG})"
    try:
        state = unpacked(text)
        if packed(state) != text:
            return "is not in its canonical form"
        require_affordable(state, rules.cost)
    except (ValidationError, StateError) as error:
        return f"cannot be served: {str(error)[:400]}"
    return ""


class PlanReader:
    """Reads plans in the worker; nothing that reaches it raises.

    A row that is no plan becomes the server's own budget chosen by the base policy alone; what a
    plan may not ask for is taken out of it. Either is counted, and the first is logged.
    """

    def __init__(self, rules: PlanRules, meter: FallbackMeter, device: torch.device) -> None:
        self._rules = rules
        self._meter = meter
        self._device = device

    def read(self, rows: Sequence[object] | Tensor) -> list[ItemPlan]:
        """The plan of every image."""
        return [self._read(row) for row in rows]

    def _read(self, row: object) -> ItemPlan:
        try:
            plan = ItemPlan.decode(row)
        except Exception as error:  # whatever a client made of it
            self._meter.refused(error, self._device)
            return ItemPlan(self._rules.served.budget, NO_KEY, keep="reference")
        try:
            self._rules.check_words(plan)
            self._rules.check_choice(plan)
        except AutopruneError as error:
            self._meter.refused(error, self._device)
            plan = replace(plan, instruction=(), language=(), keep="state", state=b"")
        return self._possible(plan)

    def _possible(self, plan: ItemPlan) -> ItemPlan:
        """The plan, or a control in its place where the state cannot have its budget.

        An image that is kept whole has such a plan rightfully, and then nobody selects by it.
        """
        for one in (plan, replace(plan, keep="reference")):
            try:
                self._rules.served.planned(one)
            except AutopruneError:
                continue
            return one
        return replace(plan, keep="random", state=b"")


@cache
def _shipped() -> frozenset[bytes]:
    """The states that requests may name, as plans carry them; each alone and without exchange."""
    states = [load_state(file) for file in shipped_states().values()]
    return frozenset(packed(s) for state in states for s in (state, state.without_exchange()))
