"""Checks of plans against the rules of the server.

The server's own API makes only plans that its rules allow. But vLLM's ``/inference/v1/generate``
takes processed inputs, plans among them, from its client. They are checked twice: the API server
refuses a request with a plan that is not allowed; the worker, which must survive any input,
replaces the plan (``worker.selection``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

from pydantic import ValidationError

from vllm_autoprune.errors import BudgetError, StateError
from vllm_autoprune.serving.plan import ItemPlan, plan_error
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.state_codec import (
    MAX_CACHED_STATES,
    decode_state,
    encode_state,
)
from vllm_autoprune.tpdsl.cost import item_bound, item_cost, require_affordable
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules for plans: those of the served state, and the language model's vocabulary size."""

    served: ServedState
    vocabulary: int

    def check(self, plan: ItemPlan, placeholders: int) -> None:
        """Raise :class:`RequestError` unless a request with this plan may be served.

        ``placeholders`` is the number of rows for which the prompt has room.
        """
        if plan.profile:
            raise plan_error("is one of memory profiling")
        if plan.budget + len(plan.text) != placeholders:
            tokens = f"K = {plan.budget} tokens"
            if plan.text:
                tokens += f" and {len(plan.text)} of text"
            raise plan_error(f"keeps {tokens} for {placeholders} placeholders")
        self._check_budgets(plan)
        self.check_choice(plan)

    def _check_budgets(self, plan: ItemPlan) -> None:
        """Raise for more tokens than the server's state and rules allow."""
        rules = self.served.rules
        by_request = rules.maximum if rules.allows("budget") else 0
        maximum = by_request
        if plan.frames:
            maximum = max(by_request * plan.frames, self._count_video_tokens(plan))
        else:
            for budget in (self.served.budget, *rules.detail.as_dict().values()):
                maximum = max(maximum, budget.range()[1])
        budgets = [*(choice.budget for choice in plan.earlier), plan.budget]
        tokens = plan.image_budget if plan.part == "delta" else budgets[0]
        if tokens > maximum:
            raise plan_error(
                f"keeps K = {tokens} tokens, and requests may keep {maximum}"
            )
        recalled = max(budgets[1:], default=0)
        maximum = max(rules.recall, by_request)
        if recalled > maximum:
            raise plan_error(
                f"recalls {recalled} tokens, and requests may recall {maximum}"
            )

    def _count_video_tokens(self, plan: ItemPlan) -> int:
        """K of a plan's video by the server's own state; 0 if that state leaves videos whole."""
        served = self.served
        if served.state.frames is None:
            return 0
        policy = materialize(served.state, served.video_budget, video=True)
        return served.count_video_tokens(policy, plan.tokens, plan.frames)

    def check_choice(self, plan: ItemPlan) -> None:
        """Raise for token ids out of range, and for a chooser or state that is not allowed."""
        for find_problem in _CHOICE_RULES:
            if problem := find_problem(self, plan):
                raise plan_error(problem)


def _find_token_problem(rules: PlanRules, plan: ItemPlan) -> str:
    """Problem of token ids beyond a vocabulary: looking one up would crash the worker."""
    size = rules.vocabulary
    text_tower = rules.served.text_tower
    relevance_size = size if text_tower is None else text_tower.vocabulary
    questions = [plan.read]
    questions += [(choice.instruction, choice.language) for choice in plan.earlier]
    for instruction, language in questions:
        if max(instruction, default=0) >= relevance_size:
            return f"has a token id for relevance beyond the vocabulary of {relevance_size}"
        if max(language, default=0) >= size:
            return f"has a token id beyond the vocabulary of {size}"
    if max((token for _, token in plan.text), default=0) >= size:
        return f"has text beyond the vocabulary of {size}"
    return ""


def _find_permission_problem(rules: PlanRules, plan: ItemPlan) -> str:
    """Problem of fields that a request may not set: chooser, state, positions."""
    served = rules.served
    by_request = served.rules.allows("budget")
    if plan.keep != "state" and not by_request:
        return (
            f"has keep = {plan.keep!r}, and requests may set nothing ({REQUESTS_FLAG})"
        )
    if plan.state and (problem := _find_state_problem(served, plan.state)):
        return f"carries a state that {problem}"
    if served.capabilities.axes and not plan.keeps_all and not by_request:
        usual = served.positions_of(served.state_for_plan(plan))
        if plan.positions not in ("packed", usual):
            return f"has positions {plan.positions!r} ({REQUESTS_FLAG})"
    if problem := find_cost_problem(plan, served.rules.cost):
        return f"carries a state whose {problem}"
    return ""


def _find_part_problem(rules: PlanRules, plan: ItemPlan) -> str:
    """Problem of parts of an item that its chooser, or the state, does not make."""
    served = rules.served
    is_part = plan.part != "whole"
    if plan.frames and (is_part or served.state_for_plan(plan).frames is None):
        return f"is of a video, as {plan.part}, and its state prunes none so"
    if is_part and plan.keep == "resized":
        return "is a part of an image that is resized"
    if plan.core and plan.keep == "random":
        return "is a part of an image whose tokens are drawn at random"
    if is_part and plan.keep != "random":
        try:
            for item in (plan, *plan.items_before()):
                served.policy_for_plan(item)
        except BudgetError as error:
            return f"is a part of an image: {error}"
    return ""


def _find_tower_problem(rules: PlanRules, plan: ItemPlan) -> str:
    """Problem of cells that no tower of this model drops."""
    if plan.tower is None or not rules.served.capabilities.whole_tower:
        return ""
    return "drops cells inside the tower, and all of this model's pass it"


def _find_need_problem(rules: PlanRules, plan: ItemPlan) -> str:
    """Problem of inputs of the plan's state that the worker does not make."""
    if not plan.state:
        return ""
    missing = rules.served.policy_for_plan(plan).needs - rules.served.needs
    if not missing:
        return ""
    return f"carries a state that reads {', '.join(sorted(missing))}"


_CHOICE_RULES: tuple[Callable[[PlanRules, ItemPlan], str], ...] = (
    _find_token_problem,
    _find_permission_problem,
    _find_part_problem,
    _find_tower_problem,
    _find_need_problem,
)
"""Functions that describe a problem of a plan's choice, or return an empty text; each may rely on
the checks of the functions before it."""


def find_cost_problem(plan: ItemPlan, bound: float) -> str:
    """Why the state in a plan may not select from its video; empty if it may.

    ``bound`` is the milliseconds of ``--autoprune-request-cost``, for every 576 of its tokens.
    """
    if not plan.state or not plan.frames or not plan.runs_policy or plan.keeps_all:
        return ""
    cost = item_cost(decode_state(plan.state), plan.tokens, plan.frames)
    allowed = item_bound(bound, plan.tokens)
    if cost <= allowed:
        return ""
    size = f"N = {plan.tokens} tokens in T = {plan.frames} frames"
    prediction = f"is predicted to take {cost:.0f} ms, and {allowed:.0f} are allowed"
    return f"selection from {size} {prediction}"


@lru_cache(maxsize=MAX_CACHED_STATES)
def _find_state_problem(served: ServedState, text: bytes) -> str:
    """Why a server refuses the state in a plan; empty if it accepts it."""
    rules = served.rules
    if not rules.allows("shipped-states"):
        return f"requests may not bring: they may set {rules} ({REQUESTS_FLAG})"
    if not rules.allows("states") and text not in _shipped():
        return (
            f"does not ship, and requests may only name those that do ({REQUESTS_FLAG})"
        )
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
    """The states that requests may name, encoded as in plans, with and without exchange."""
    texts = set[bytes]()
    for file in shipped_states().values():
        state = load_state(file)
        texts |= {encode_state(state), encode_state(state.without_exchange())}
    return frozenset(texts)
