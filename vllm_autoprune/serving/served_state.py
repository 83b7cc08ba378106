"""What a server serves, on the model config of every process; states and plans that it accepts."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import JsonValue, ValidationError

from vllm_autoprune import __version__
from vllm_autoprune.errors import (
    BudgetError,
    Problem,
    Refusal,
    RequestError,
    StateError,
)
from vllm_autoprune.serving.compat import get_attachment
from vllm_autoprune.serving.plan import (
    ENTRY,
    MAX_CACHED_STATES,
    MROPE,
    ItemPlan,
    decode_state,
    encode_state,
    plan_error,
    refuse,
)
from vllm_autoprune.serving.settings import (
    DEFAULT_RULES,
    REQUESTS_FLAG,
    RequestRules,
    TextTower,
)
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.cost import (
    DEFAULT_COST,
    item_bound,
    item_cost,
    require_affordable,
)
from vllm_autoprune.tpdsl.loading import (
    escape_unprintable,
    load_state,
    shipped_states,
    suggest_name,
)
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.safety import MAX_PROBED_BUDGET, safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need, Positions

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# ServedState: the immutable state and settings of a server, pickled to every process.

ATTRIBUTE = "autoprune"

NEEDS: tuple[Need, ...] = get_args(Need)

_PERMISSIONS = {
    "budget": "their budget",
    "shipped-states": "a state that ships",
    "states": "any state",
}


@dataclass(frozen=True)
class ServedState:
    """The state that a server runs, with its default budget, text tower and request rules.

    ``rules`` are the permissions of requests; ``unavailable`` are inputs that request states cannot
    read, each with the reason. Workers write metrics to ``metrics_folder``, nowhere if it is empty;
    ``kv_bytes`` is the size of one token in the KV cache, None where that is not known. ``cells``
    drops cells before the tower, ``whole_only`` says why no rule can, empty where one can.
    ``clips`` says whether tokens of videos can be chosen, ``video_budget`` is their budget in the
    place of a state's own; ``frame`` is that of the backbone. ``positions`` are the operator's, in
    the place of a state's own; ``axes`` those of positions that workers keep, 0 where tokens are
    ``packed_only``, which says why.
    """

    architecture: str
    state: PruningState
    budget: BudgetCall
    tower: TextTower | None
    cache_bytes: int
    rules: RequestRules = DEFAULT_RULES
    unavailable: tuple[tuple[Need, str], ...] = ()
    metrics_folder: str = ""
    kv_bytes: int | None = None
    cells: Cells | None = None
    whole_only: str = ""
    clips: bool = False
    video_budget: BudgetCall | None = None
    frame: tuple[int, int] | None = None
    positions: Positions | None = None
    axes: int = 0
    packed_only: str = ""

    def positions_of(
        self, state: PruningState, asked: Positions | None = None
    ) -> Positions:
        """Where tokens stand that a state chooses, or that a request asks for.

        Raises :class:`RequestError` where this server cannot do what is asked.
        """
        only: Positions | None = "true" if self.axes == MROPE else None
        why = (
            "has positions in height and width, in which kept tokens keep their places"
        )
        if self.axes == 0:
            only = "packed"
            why = self.packed_only
        if asked is not None and only not in (None, asked):
            where = f"{ENTRY}/positions"
            what = f"{asked!r}: this model {why}"
            raise refuse(where, what, "leave it out", Refusal.UNSUPPORTED)
        return only or asked or self.positions or state.positions

    def count_video_tokens(
        self, policy: PruningPolicy, tokens: int, frames: int
    ) -> int:
        """K of a video of N tokens in T frames, N where a policy keeps all tokens of its frames.

        Rows behind the last frame are among N, and never more are kept than the policy's largest K:
        a number, or the end of a rule, is what a request has for its video.
        """
        candidates = tokens - (self.frame[1] if self.frame else 0)
        budget = policy.at(candidates, frames).budget
        return min(tokens, policy.budget) if budget >= candidates else budget

    def state_for_plan(self, plan: ItemPlan) -> PruningState:
        """The state in a plan, or the server's own."""
        return decode_state(plan.state) if plan.state else self.state

    def policy_for_plan(self, plan: ItemPlan) -> PruningPolicy:
        """Policy of a plan: of the state in the plan, or of the server's own.

        For a core it is the one that keeps the core alone, for a delta that of both parts, for a
        recall the one that chooses its tokens. Raises BudgetError.
        """
        state = self.state_for_plan(plan)
        exchange = plan.keep == "state"
        if plan.part == "recall":
            return materialize(state, plan.budget, part="recall", exchange=exchange)
        if plan.part == "core":
            return materialize(state, plan.core, part="core")
        core = plan.core if plan.part == "delta" else None
        video = plan.frames > 0
        return materialize(
            state, plan.image_budget, core, video=video, exchange=exchange
        )

    def find_needs(self, plan: ItemPlan) -> frozenset[Need]:
        """Optional inputs that the policy of a plan reads, none where no policy is run.

        Raises :class:`RequestError` where this server does not make them.
        """
        if plan.keeps_all or not plan.runs_policy:
            return frozenset()
        policy = self.policy_for_plan(plan)
        if missing := policy.needs - self.needs:
            reasons = dict(self.unavailable)
            inputs = "; ".join(
                f"{n!r} ({reasons.get(n, 'not set up')})" for n in sorted(missing)
            )
            readers = f"its base policy {policy.base.name!r} or its atoms"
            what = f"{readers} read what is not made here: {inputs}"
            fix = "bring a state that does not read it"
            raise refuse(f"{ENTRY}/state", what, fix, Refusal.UNSUPPORTED)
        return policy.needs

    def selection_identity(self, state: PruningState) -> str:
        """Identity of the selection: everything it depends on except image, K and instruction."""
        tower = "" if self.tower is None else f"|{self.tower.path}|{self.tower.sign}"
        return state.digest + tower

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that any request may make the workers read: quotas grow with K.

        If requests may bring states, these are all available inputs: features are computed once per
        image, before it is known which inputs later states read.
        """
        quota, _ = self.state.constraints.selector.bounds(MAX_BUDGET)
        of_state = self.state.needs(exchange=quota > 0)
        if not self.rules.allows("shipped-states"):
            return of_state
        return of_state | (frozenset(NEEDS) - {need for need, _ in self.unavailable})

    def describe(self) -> dict[str, JsonValue]:
        """JSON of `GET /v1/autoprune`: the served state, its digest, budget and evidence.

        The core is that before it is moved to the edge of a KV block. No local path is told.
        """
        policy = materialize(self.state, self.budget)
        state = self.state
        rules = self.rules
        tower = self.tower
        core = policy.state.core
        # Embedding space of relevance, with its reason.
        relevance = None
        if policy.reads_instruction and tower is None:
            reason = "because no --autoprune-text-tower is given"
            relevance = f"the language model's input embeddings, sign +1, {reason}"
        elif policy.reads_instruction and tower is not None:
            local = Path(tower.path).exists() or Path(tower.path).is_absolute()
            name = "from a local folder" if local else tower.path
            relevance = (
                f"CLIP text tower {name}, sign {tower.sign:+d}, because {tower.reason}"
            )
        # What requests may set, with the flag that lets them.
        if not rules.explicit:
            trusted = "with --trust-request-mm-kwargs: their budget"
            requests = f"nothing, because no {REQUESTS_FLAG} is given ({trusted})"
        elif rules.level == "none":
            requests = f"nothing, by {REQUESTS_FLAG} none"
        else:
            tokens = f"{rules.minimum} to {rules.maximum} tokens of an image"
            requests = f"{_PERMISSIONS[rules.level]}, {tokens}, by {REQUESTS_FLAG}"
            if rules.allows("shipped-states"):
                requests += f", at a predicted {rules.cost:g} ms a selection or less"
        return {
            "version": __version__,
            "architecture": self.architecture,
            "state": state.name,
            "digest": state.digest,
            "base_policy": policy.base.name,
            "budget": {
                "k": self.budget.rule(),
                "follows_image_size": policy.by_size is not None,
                "q_e": policy.quota,
                "r_min": None if policy.by_size else policy.r_min,
            },
            "positions": self.positions_of(state),
            "packed_only": self.packed_only or None,
            "core": None
            if core is None
            else {"k_c": policy.core, "share": core.share, "policy": core.policy.name},
            "cells": None if self.cells is None else str(self.cells),
            "reads": [*sorted(policy.needs)],
            "relevance": relevance,
            "requests": requests,
            "allows": {
                "level": rules.level if rules.explicit else "none",
                "tokens": [rules.minimum, rules.maximum],
            },
            "detail": {
                str(level): budget.rule()
                for level, budget in rules.detail.as_dict().items()
            }
            or None,
            "recall": rules.recall,
            "request_budget": rules.total,
            "evidence": state.provenance.model_dump(mode="json"),
        }

    def __getstate__(self) -> dict[str, Any]:
        # As text, because parameter models are made from the registry and have no import path.
        return {**vars(self), "state": self.state.dumps()}

    def __setstate__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields, state=load_state(fields["state"]))


def served_state(model_config: ModelConfig) -> ServedState | None:
    """The served state of a model config; None for a stock server."""
    served = get_attachment(model_config, ATTRIBUTE)
    assert served is None or isinstance(served, ServedState)
    return served


KV_CACHE = "autoprune_kv_cache"
"""Attribute of a model config with vLLM's own cache config, which gets its block size later on."""


# Safety check of a state before it is served (Algorithm 1, line 4).

_logger = logging.getLogger("vllm.autoprune")

_CHECKED_REQUEST_BUDGET = 64
"""Bound of K for states of requests, which the API server checks between its requests."""

_MAX_WARNINGS = 16
"""Warnings of one process: requests bring states, and clients could fill its log with them."""

_warnings = itertools.count(1)


def replace_unsafe_state(state: PruningState, budget: int) -> PruningState:
    """The state to serve at a budget: itself, or its base policy where the check fails.

    A failing state is replaced where it lists ``fallback_to_selection``, with a warning in the
    log; otherwise :class:`StateError` is raised.
    """
    probed = state
    selector = state.constraints.selector
    if (selector.insists_on or 0) > budget:
        # Of a request, checked at fewer tokens than it would keep unchanged: these then follow from
        # q_e, as without r_min, since the check takes seconds at hundreds of tokens.
        selector = selector.model_copy(update={"r_min": None})
        constraints = state.constraints.model_copy(update={"selector": selector})
        probed = state.model_copy(update={"constraints": constraints})
    policy = materialize(probed, min(budget, MAX_PROBED_BUDGET))
    record = safety_check(policy)
    if record.valid:
        return state
    failures = "; ".join(f"{v.name}: {v.detail}" for v in record.failures())
    if not policy.falls_back:
        fix = 'fix the state, or list "fallback_to_selection" under safety'
        problem = Problem(
            "/safety", f"the safety check fails ({failures})", fix, "safety"
        )
        raise StateError(f"state {state.name!r}", [problem])
    if (number := next(_warnings)) <= _MAX_WARNINGS:
        _logger.warning(
            "State %r fails its safety check (%s): serving its base policy.%s",
            state.name,
            failures,
            " Further states that fail are not logged."
            if number == _MAX_WARNINGS
            else "",
        )
    return state.without_exchange()


# States in requests, by name or whole: size-limited, safety-checked, cached by digest.

_MAX_STATE_CHARACTERS = 1 << 16
"""Bound of a whole state as JSON; the encoded behaviour has a lower bound of its own."""

_shipped_files = cache(shipped_states)
_load = lru_cache(maxsize=2 * MAX_CACHED_STATES)(load_state)


def load_request_state(
    state_field: str | Mapping[str, object], cost: float = DEFAULT_COST
) -> PruningState:
    """Load the state that a request names or holds, safety-checked for serving.

    Raises :class:`RequestError`, before the state is run where its selection is predicted to take
    more than ``cost`` milliseconds. A name is looked up among the states that ship and is never a
    path.
    """
    source: Path | str
    where = f"{ENTRY}/state"
    if isinstance(state_field, str):
        files = _shipped_files()
        if state_field not in files:
            name = escape_unprintable(state_field[:80], 80)
            what = f"no state of the name {name!r} ships with this server"
            fix = suggest_name(state_field[:80], list(files))
            raise refuse(where, what, fix, Refusal.UNKNOWN_STATE)
        source = files[state_field]
    else:
        try:
            source = json.dumps(state_field)
        except (TypeError, ValueError, RecursionError) as error:
            raise refuse(
                where, f"no JSON: {str(error)[:200]}", "send a state as JSON"
            ) from None
        if len(source) > _MAX_STATE_CHARACTERS:
            what = f"{len(source)} characters, and a request may bring {_MAX_STATE_CHARACTERS}"
            raise refuse(
                where, what, "a state is a few kilobytes: shorten its provenance"
            )
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
            replace(problem, where=f"{where}{problem.where}")
            for problem in error.problems[:16]
        ]
        raise RequestError("request", problems) from None


@lru_cache(maxsize=MAX_CACHED_STATES)
def _check(text: bytes) -> PruningState | StateError:
    """The state to serve, or the error where there is none; computed once a digest."""
    state = decode_state(text)
    try:
        return replace_unsafe_state(
            state, min(materialize(state).budget, _CHECKED_REQUEST_BUDGET)
        )
    except StateError as error:
        return error


# Checks of plans against the rules of the server.
#
# The server's own API makes only plans that its rules allow. But vLLM's ``/inference/v1/generate``
# takes processed inputs, plans among them, from its client. They are checked twice: the API server
# refuses a request with a plan that is not allowed; the worker, which must survive any input,
# replaces the plan (``worker.selection``).


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
        if plan.budget + len(plan.text) != placeholders:
            kept = f"keeps K = {plan.budget} tokens"
            kept += f" and {len(plan.text)} of text" if plan.text else ""
            raise plan_error(f"{kept} for {placeholders} placeholders")
        # No more tokens than the server's state and rules allow.
        rules = self.served.rules
        by_request = rules.maximum if rules.allows("budget") else 0
        by_operator = (self.served.budget, *rules.detail.as_dict().values())
        most = max(by_request, *(budget.range()[1] for budget in by_operator))
        if plan.frames:
            most = by_request * plan.frames
            state = self.served.state
            if state.frames is not None:
                policy = materialize(state, self.served.video_budget, video=True)
                most = max(
                    most,
                    self.served.count_video_tokens(policy, plan.tokens, plan.frames),
                )
        budget, *recalls = [*(choice.budget for choice in plan.earlier), plan.budget]
        if plan.part == "delta":
            budget = plan.image_budget
        if budget > most:
            raise plan_error(f"keeps K = {budget} tokens, and requests may keep {most}")
        if (recall := max(recalls, default=0)) > (
            most := max(rules.recall, by_request)
        ):
            raise plan_error(f"recalls {recall} tokens, and requests may recall {most}")
        self.check_choice(plan)

    def check_choice(self, plan: ItemPlan) -> None:  # noqa: C901
        """Raise for what a worker cannot look up, or requests may not set: ids, chooser, state."""
        served = self.served
        # Looking up an id beyond its vocabulary would crash the worker.
        size = self.vocabulary if served.tower is None else served.tower.vocabulary
        reads = [
            plan.read,
            *((choice.instruction, choice.language) for choice in plan.earlier),
        ]
        for instruction, language in reads:
            if max(instruction, default=0) >= size:
                raise plan_error(
                    f"has a token id for relevance beyond the vocabulary of {size}"
                )
            if max(language, default=0) >= self.vocabulary:
                raise plan_error(
                    f"has a token id beyond the vocabulary of {self.vocabulary}"
                )
        if max((token for _, token in plan.text), default=0) >= self.vocabulary:
            raise plan_error(f"has text beyond the vocabulary of {self.vocabulary}")
        if plan.keep != "state" and not served.rules.allows("budget"):
            raise plan_error(
                f"has keep = {plan.keep!r}, and requests may set nothing ({REQUESTS_FLAG})"
            )
        if plan.state and (problem := _state_problem(served, plan.state)):
            raise plan_error(f"carries a state that {problem}")
        if served.axes and not plan.keeps_all and not served.rules.allows("budget"):
            usual = served.positions_of(served.state_for_plan(plan))
            if plan.positions not in ("packed", usual):
                raise plan_error(f"has positions {plan.positions!r} ({REQUESTS_FLAG})")
        if problem := find_cost_problem(plan, served.rules.cost):
            raise plan_error(f"carries a state whose {problem}")
        if plan.frames and (
            plan.part != "whole" or served.state_for_plan(plan).frames is None
        ):
            raise plan_error(
                f"is of a clip, as {plan.part}, and its state prunes none so"
            )
        if plan.part != "whole" and plan.keep == "resized":
            raise plan_error("is a part of an image that is resized")
        if plan.core and plan.keep == "random":
            raise plan_error("is a part of an image whose tokens are drawn at random")
        if plan.part != "whole" and plan.keep != "random":
            try:
                for item in (plan, *plan.items_before()):
                    served.policy_for_plan(item)
            except BudgetError as error:
                raise plan_error(f"is a part of an image: {error}") from None
        if plan.state and (
            missing := served.policy_for_plan(plan).needs - served.needs
        ):
            raise plan_error(f"carries a state that reads {', '.join(sorted(missing))}")


def find_cost_problem(plan: ItemPlan, bound: float) -> str:
    """Why a clip is not selected from by the state in its plan; empty where it may be.

    ``bound`` are the milliseconds of ``--autoprune-request-cost``, for each 576 of its tokens.
    """
    if not plan.state or not plan.frames or not plan.runs_policy or plan.keeps_all:
        return ""
    cost = item_cost(decode_state(plan.state), plan.tokens, plan.frames)
    most = item_bound(bound, plan.tokens)
    if cost <= most:
        return ""
    size = f"N = {plan.tokens} tokens in T = {plan.frames} frames"
    return f"selection from {size} is predicted to take {cost:.0f} ms, and {most:.0f} are allowed"


@lru_cache(maxsize=MAX_CACHED_STATES)
def _state_problem(served: ServedState, text: bytes) -> str:
    """Why a server refuses the state in a plan; empty where it accepts it."""
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
    """The states that requests may name, as plans carry them; each alone and without exchange."""
    states = [load_state(file) for file in _shipped_files().values()]
    return frozenset(
        encode_state(s) for state in states for s in (state, state.without_exchange())
    )
