"""What each image of a request gets: K of its N tokens, and the state or control that chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

from vllm_autoprune.errors import Problem, RequestError, StateError
from vllm_autoprune.serving.api.layout import TokenCount, split_shared_budget
from vllm_autoprune.serving.api.request import (
    ENTRY,
    MAX_PROBLEMS,
    PruningRequest,
    SharedBudget,
    request_error,
)
from vllm_autoprune.serving.plan import (
    MAX_CACHED_STATES,
    NO_KEY,
    ItemPlan,
    decode_state,
    encode_state,
    runs_policy,
)
from vllm_autoprune.serving.served_state import (
    CHECKED_REQUEST_BUDGET,
    ServedState,
    make_policy,
    replace_unsafe_state,
)
from vllm_autoprune.serving.settings import REQUESTS_FLAG, Level, RequestRules
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, require_affordable
from vllm_autoprune.tpdsl.loading import (
    escape_unprintable,
    load_state,
    shipped_states,
    suggest_name,
)
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

# States in requests, by name or whole: size-limited, safety-checked, cached by digest.


MAX_STATE_CHARACTERS = 1 << 16
"""Bound of a whole state as JSON; the encoded behaviour has a lower bound of its own."""

_shipped_files = cache(shipped_states)


def load_request_state(
    state_field: str | Mapping[str, object], cost: float = DEFAULT_COST
) -> PruningState:
    """Load the state that a request names or holds, safety-checked for serving.

    Raises :class:`RequestError`, before the state is run where its selection is predicted to take
    more than ``cost`` milliseconds. A name is looked up among the states that ship and is never a
    path.
    """
    source: Path | str
    if isinstance(state_field, str):
        name, files = state_field[:80], _shipped_files()
        if state_field not in files:
            what = f"no state of the name {escape_unprintable(name, 80)!r} ships with this server"
            raise request_error("state", what, suggest_name(name, list(files)))
        source = files[state_field]
    else:
        try:
            source = json.dumps(state_field)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"no JSON: {str(error)[:200]}"
            raise request_error("state", what, "send a state as JSON") from None
        if len(source) > MAX_STATE_CHARACTERS:
            what = f"{len(source)} characters, and a request may bring {MAX_STATE_CHARACTERS}"
            raise request_error("state", what, "a state is a few kilobytes: shorten its provenance")
    try:
        state = _load(source)
        text = encode_state(state)
        require_affordable(state, cost)
        verdict = _check(text)
        if isinstance(verdict, StateError):
            raise verdict
        return verdict
    except StateError as error:
        problems = [
            Problem(f"{ENTRY}/state{p.where}", p.what, p.fix) for p in error.problems[:MAX_PROBLEMS]
        ]
        raise RequestError("request", problems) from None


@lru_cache(maxsize=2 * MAX_CACHED_STATES)
def _load(source: Path | str) -> PruningState:
    return load_state(source)


@lru_cache(maxsize=MAX_CACHED_STATES)
def _check(text: bytes) -> PruningState | StateError:
    """The state to serve, or the error where there is none; computed once a digest."""
    state = decode_state(text)
    try:
        return replace_unsafe_state(state, min(materialize(state).budget, CHECKED_REQUEST_BUDGET))
    except StateError as error:
        return error


# Resolution of a request: the budget K of each of its images, and what chooses their tokens.


def resolve_plans(
    served: ServedState, request: PruningRequest, images: Sequence[TokenCount]
) -> list[ItemPlan]:
    """Resolve each of a request's images to its plan as one item, without key and instruction.

    Raises :class:`BudgetError` or :class:`RequestError`, which vLLM answers by 400.
    """
    rules = served.rules
    _require_permission(rules, request)
    if (recall := request.recall or 0) > rules.maximum:
        what = f"K_r = {recall}, and requests may recall {rules.maximum} tokens at most"
        raise request_error("recall", what, f"ask for 0 to {rules.maximum}")
    sizes = [image.tokens for image in images]
    if not request.enabled:
        contradictions = {
            "budget": request.budget is not None,
            "state": request.state is not None,
            "keep": request.keep != "state",
        }
        if names := [name for name, is_set in contradictions.items() if is_set]:
            what = f"false keeps every token, but {', '.join(map(repr, names))} is given as well"
            raise request_error("enabled", what, f"leave out 'enabled' or {names[0]!r}")
        for size in sizes:
            _require_in_range(rules, size, "enabled", "all tokens of an image")
        return [ItemPlan(size, NO_KEY, tokens=size) for size in sizes]
    state, encoded = None, b""
    if request.state is not None:
        state = load_request_state(request.state, rules.cost)
        encoded = encode_state(state)
    details = request.details
    if details is None or len(details) != len(images):
        # No messages, or messages of a form in which the images were not found.
        details = [None] * len(images)
    plans = []
    for image, asked, detail in zip(images, _split_budget(request, sizes), details, strict=True):
        if asked is not None and not 1 <= asked <= MAX_BUDGET:
            what = f"K = {asked}, and the image has N = {image.tokens} tokens"
            fix = f"give 1 to {image.tokens}; {image.tokens} keeps all of them"
            raise request_error("budget", what, fix)
        # Start-up has checked the operator's budgets for details against the range of the rules.
        budget = rules.detail.budget(detail) if asked is None else asked
        if state is None:
            policy = served.policy(budget, request.keep)
        else:
            policy = make_policy(state, budget, request.keep)
        kept = policy.at(image.tokens, image.tiles).budget
        if asked is not None or (state is not None and budget is None):
            _require_in_range(rules, kept, "state" if asked is None else "budget", "K")
        plan = ItemPlan(image.tokens, NO_KEY, keep=request.keep, tokens=image.tokens)
        if kept < image.tokens:
            plan = ItemPlan(kept, NO_KEY, (), (), request.keep, False, encoded, image.tokens)
        find_needs(served, plan)
        plans.append(plan)
    return plans


def find_needs(served: ServedState, plan: ItemPlan) -> frozenset[Need]:
    """Optional inputs that the policy of a plan reads, none where no policy is run.

    Raises :class:`RequestError` where this server does not make them.
    """
    if plan.keeps_all or not runs_policy(plan.keep):
        return frozenset()
    policy = served.policy_for_plan(plan)
    missing = policy.needs - served.needs
    if missing:
        reasons = dict(served.unavailable)
        inputs = "; ".join(f"{n!r} ({reasons.get(n, 'not set up')})" for n in sorted(missing))
        readers = f"its base policy {policy.base.name!r} or its atoms"
        what = f"{readers} read what is not made here: {inputs}"
        raise request_error("state", what, "bring a state that does not read it")
    return policy.needs


def state_label(served: ServedState, request: PruningRequest) -> str:
    """Metric label of a request's state; a state of its own is counted as ``request``."""
    if not request.enabled:
        return "off"
    if request.state is None:
        return served.state.name
    return request.state if isinstance(request.state, str) else "request"


def _require_permission(rules: RequestRules, request: PruningRequest) -> None:
    needed: dict[str, tuple[bool, Level]] = {
        "budget": (request.budget is not None, "budget"),
        "keep": (request.keep != "state", "budget"),
        "enabled": (not request.enabled, "budget"),
        "recall": (bool(request.recall), "budget"),
        "state": (
            request.state is not None,
            "shipped-states" if isinstance(request.state, str) else "states",
        ),
    }
    for field, (is_set, level) in needed.items():
        if is_set and not rules.allows(level):
            what = f"this server's requests may set: {rules} ({REQUESTS_FLAG})"
            raise request_error(field, what, f"leave it out, or serve with {REQUESTS_FLAG} {level}")


def _require_in_range(rules: RequestRules, budget: int, field: str, name: str) -> None:
    if not rules.contains(budget):
        what = f"{name} = {budget}, and requests may ask for {rules.minimum} to {rules.maximum}"
        raise request_error(field, what, "ask for a number in the range")


def _split_budget(request: PruningRequest, sizes: Sequence[int]) -> Sequence[int | None]:
    """Requested budget of each image; None for the state's own."""
    budget = request.budget
    if isinstance(budget, SharedBudget):
        if budget.shared < len(sizes):
            what = f"{budget.shared} tokens for {len(sizes)} images"
            raise request_error("budget/shared", what, "give at least one token an image")
        return split_shared_budget(budget.shared, sizes)
    if isinstance(budget, tuple):
        if len(budget) != len(sizes):
            what = f"{len(budget)} budgets for {len(sizes)} images"
            raise request_error("budget", what, "give one an image, in their order")
        return budget
    return [budget] * len(sizes)
