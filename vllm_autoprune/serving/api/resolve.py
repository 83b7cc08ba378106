"""What a request asks for its images: K of their tokens, what chooses them, cells to drop.

Each function raises :class:`BudgetError` or :class:`RequestError`, which vLLM answers by 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_autoprune.errors import Refusal
from vllm_autoprune.serving.api.cells import Trimming
from vllm_autoprune.serving.api.layout import TokenCount
from vllm_autoprune.serving.api.request import PruningRequest, split_shared_budget
from vllm_autoprune.serving.plan import ENTRY, NO_KEY, ItemPlan, refuse
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG, Level, RequestRules
from vllm_autoprune.serving.request_states import load_request_state
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState


def check_fields(served: ServedState, request: PruningRequest) -> PruningState | None:
    """Refuse the fields that the server does not let requests set; the state that is asked for."""
    rules = served.rules
    asked_state = request.state
    by_name: Level = "shipped-states" if isinstance(asked_state, str) else "states"
    needed: dict[str, tuple[bool, Level]] = {
        "budget": (request.budget is not None, "budget"),
        "video_budget": (request.video_budget is not None, "budget"),
        "cells": (request.cells is not None, "budget"),
        "positions": (request.positions is not None, "budget"),
        "keep": (request.keep != "state", "budget"),
        "enabled": (not request.enabled, "budget"),
        "recall": (bool(request.recall), "budget"),
        "state": (asked_state is not None, by_name),
    }
    for field, (is_set, level) in needed.items():
        if is_set and not rules.allows(level):
            what = f"this server's requests may set: {rules} ({REQUESTS_FLAG})"
            fix = f"leave it out, or serve with {REQUESTS_FLAG} {level}"
            raise refuse(f"{ENTRY}/{field}", what, fix, Refusal.NOT_ALLOWED)
    if (recall := request.recall or 0) > rules.maximum:
        what = f"K_r = {recall}, and requests may recall {rules.maximum} tokens at most"
        fix = f"ask for 0 to {rules.maximum}"
        raise refuse(f"{ENTRY}/recall", what, fix, Refusal.OUT_OF_RANGE)
    if not request.enabled:
        others = ("budget", "video_budget", "state", "keep", "cells", "positions")
        if names := [name for name in others if needed[name][0]]:
            what = f"false keeps every token, but {', '.join(map(repr, names))} is given as well"
            raise refuse(
                f"{ENTRY}/enabled", what, f"leave out 'enabled' or {names[0]!r}"
            )
        return None
    return None if asked_state is None else load_request_state(asked_state, rules.cost)


def resolve_plans(  # noqa: C901
    served: ServedState,
    request: PruningRequest,
    state: PruningState | None,
    images: Sequence[TokenCount],
    limit: int | None = None,
) -> list[ItemPlan]:
    """Resolve each of a request's images to its plan as one item, without key and instruction.

    ``state`` is the one that the request asks for. K is that of an image's N tokens, or all M that
    are encoded where these are fewer; ``limit`` bounds the sum of all.
    """
    rules = served.rules
    sizes = [image.tokens for image in images]

    def require_in_range(tokens: int, field: str) -> None:
        if not rules.minimum <= tokens <= rules.maximum:
            limits = f"{rules.minimum} to {rules.maximum}"
            what = f"K = {tokens}, and requests may ask for {limits}"
            fix = "ask for a number in the range"
            if field == "budget":
                fix += (
                    f", or for a share within it: 1/8:{rules.minimum}-{rules.maximum}"
                )
            raise refuse(f"{ENTRY}/{field}", what, fix, Refusal.OUT_OF_RANGE)

    if not request.enabled:
        check_unpruned(rules, sizes, limit)
        return [ItemPlan(size, NO_KEY, tokens=size) for size in sizes]
    budgets = request.split_budget(sizes)
    encoded = b"" if state is None else encode_state(state)
    positions = served.positions_of(state or served.state, request.positions)
    details = request.details
    if details is None or len(details) != len(images):
        # No messages, or messages of a form in which the images were not found.
        details = [None] * len(images)

    def plan_image(image: TokenCount, most: int | None, field: str = "") -> ItemPlan:
        budget: int | BudgetCall | None = most
        if state is None and most is None:
            budget = served.budget
        selected_by = state or served.state
        policy = materialize(selected_by, budget, exchange=request.keep == "state")
        k = policy.at(image.tokens, image.tiles).budget
        if field:
            require_in_range(k, field)
        plan = ItemPlan(image.encoded, NO_KEY, keep=request.keep, tokens=image.encoded)
        if k >= image.encoded:
            return plan
        return replace(plan, budget=k, state=encoded, positions=positions)

    plans = []
    for image, asked, detail in zip(images, budgets, details, strict=True):
        # Start-up has checked the operator's budgets for details against the range of the rules.
        by_detail = rules.detail.as_dict().get(detail) if detail else None
        most = (
            by_detail.tokens_kept(image.tokens)
            if by_detail and asked is None
            else asked
        )
        field = "state" if state is not None and most is None else ""
        plans.append(plan_image(image, most, field if asked is None else "budget"))
        served.find_needs(plans[-1])
    kept = [plan.budget for plan in plans]
    shares = share_tokens(limit, kept, "" if request.budget is None else "budget")
    return plans if shares is None else list(map(plan_image, images, shares))


def check_unpruned(
    rules: RequestRules, sizes: Sequence[int], limit: int | None
) -> None:
    """Refuse images of N tokens that a request keeps whole, where one or all of them are too many.

    MIN, the least number of tokens to which an image may be cut, says nothing about them.
    """
    if (largest := max(sizes, default=0)) > rules.maximum:
        what = f"false keeps all {largest} tokens of an image, and requests may keep "
        what += str(rules.maximum)
        fix = "ask for a budget"
        raise refuse(f"{ENTRY}/enabled", what, fix, Refusal.OUT_OF_RANGE)
    share_tokens(limit, sizes, "enabled")


def share_tokens(
    limit: int | None, kept: Sequence[int], asked: str = ""
) -> Sequence[int] | None:
    """K of each item of a request that would keep more than the limit; None where it does not.

    Raises :class:`RequestError` where the field of a request asked for so many, or where the items
    are more than the limit.
    """
    if limit is None or sum(kept) <= limit:
        return None
    what = f"{sum(kept)} tokens of {len(kept)}, and a request has {limit} for them"
    if asked:
        fix = "ask for fewer, or leave it out"
        raise refuse(f"{ENTRY}/{asked}", what, fix, Refusal.OUT_OF_RANGE)
    if limit < len(kept):
        fix = "send fewer images or videos"
        raise refuse("messages", what, fix, Refusal.OUT_OF_RANGE)
    return split_shared_budget(limit, kept)


def find_trimming(
    served: ServedState, request: PruningRequest, state: PruningState | None
) -> Trimming | None:
    """What drops cells of a request's images; None where nothing does.

    The resize control has none: it is what a client would do instead.
    """
    rule = request.cells
    if rule is None:
        rule = served.cells if state is None else state.cells
    if (
        rule is None
        or rule == "none"
        or not request.enabled
        or request.keep == "resized"
    ):
        return None
    if served.capabilities.whole_only:
        what = f"no cell can be dropped: this model {served.capabilities.whole_only}"
        fix = "leave it out, also of a state"
        raise refuse(f"{ENTRY}/cells", what, fix, Refusal.UNSUPPORTED)
    return Trimming(rule)
