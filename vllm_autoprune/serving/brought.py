"""States that requests bring, by name or whole: read within bounds, checked, and kept by digest.

Knows nothing about budgets or images, nor about whether this request may bring one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from vllm_autoprune.errors import Problem, RequestError, StateError
from vllm_autoprune.serving.carried import KEPT, packed, unpacked
from vllm_autoprune.serving.request import ENTRY, TOLD, refusal
from vllm_autoprune.serving.vetting import CHECKED_REQUEST_BUDGET, vetted
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.state_cost import DEFAULT_COST, require_affordable
from vllm_autoprune.tpdsl.states.diagnosis import suggest_name
from vllm_autoprune.tpdsl.states.json_values import escape_unprintable
from vllm_autoprune.tpdsl.states.load import load_state, shipped_states
from vllm_autoprune.tpdsl.states.state import PruningState

MAX_TEXT = 1 << 16
"""Characters of a whole state as JSON; what decides behaviour is bounded again, much lower."""


def brought(policy: str | Mapping[str, object], cost: float = DEFAULT_COST) -> PruningState:
    """The state that a request names or holds, fit to be served.

    Raises :class:`RequestError`, before the state is run where its selection is predicted to take
    more than ``cost`` milliseconds. A name is looked up among the states that ship and is never a
    path.
    """
    try:
        state = _named(policy) if isinstance(policy, str) else _loaded(_text(policy))
        text = packed(state)
        require_affordable(state, cost)
        verdict = _verdict(text)
        if isinstance(verdict, StateError):
            raise verdict
        return verdict
    except StateError as error:
        problems = [
            Problem(f"{ENTRY}/policy{p.where}", p.what, p.fix) for p in error.problems[:TOLD]
        ]
        raise RequestError("request", problems) from None


def _named(name: str) -> PruningState:
    file = _shipped().get(name)
    if file is None:
        what = f"no state of the name {escape_unprintable(name[:80], 80)!r} ships with this server"
        raise refusal("policy", what, suggest_name(name[:80], list(_shipped())))
    return _read(file)


def _text(state: Mapping[str, object]) -> str:
    try:
        text = json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("policy", f"no JSON: {str(error)[:200]}", "send a state as JSON") from None
    if len(text) > MAX_TEXT:
        what = f"{len(text)} characters, and a request may bring {MAX_TEXT}"
        raise refusal("policy", what, "a state is a few kilobytes: shorten its provenance")
    return text


@cache
def _shipped() -> dict[str, Path]:
    return shipped_states()


@lru_cache(maxsize=KEPT)
def _read(file: Path) -> PruningState:
    return load_state(file)


@lru_cache(maxsize=KEPT)
def _loaded(text: str) -> PruningState:
    return load_state(text)


@lru_cache(maxsize=KEPT)
def _verdict(text: bytes) -> PruningState | StateError:
    """The state to serve, or why there is none: either is found out once a digest."""
    state = unpacked(text)
    try:
        return vetted(state, min(materialize(state).budget, CHECKED_REQUEST_BUDGET))
    except StateError as error:
        return error
