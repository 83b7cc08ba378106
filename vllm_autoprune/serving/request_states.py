"""States in requests, by name or whole: size-limited, safety-checked, cached by digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from vllm_autoprune.errors import Refusal, RequestError, StateError
from vllm_autoprune.serving.plan import ENTRY
from vllm_autoprune.serving.state_codec import (
    MAX_CACHED_STATES,
    decode_state,
    encode_state,
)
from vllm_autoprune.serving.state_safety import replace_unsafe_state
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, require_affordable
from vllm_autoprune.tpdsl.loading import (
    escape_unprintable,
    load_state,
    shipped_states,
    suggest_name,
)
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_CHECKED_BUDGET = 64
"""Bound of K in the safety check of request states, which the API server runs between requests."""

_MAX_STATE_CHARACTERS = 1 << 16
"""Bound of the JSON of a whole state; the encoded state has a lower bound of its own."""

_shipped_files = cache(shipped_states)
_load = lru_cache(maxsize=2 * MAX_CACHED_STATES)(load_state)


def load_request_state(
    state_field: str | Mapping[str, object], cost: float = DEFAULT_COST
) -> PruningState:
    """Load the state that a request names or contains, safety-checked for serving.

    Raises :class:`RequestError`; a state whose selection is predicted to take more than ``cost``
    milliseconds is refused before it is run. A name is looked up among the shipped states and is
    never a path.
    """
    source: Path | str
    where = f"{ENTRY}/state"
    if isinstance(state_field, str):
        files = _shipped_files()
        name = state_field[:80]
        if state_field not in files:
            name_shown = escape_unprintable(name, 80)
            what = f"no state of the name {name_shown!r} ships with this server"
            fix = suggest_name(name, list(files))
            raise RequestError.of(where, what, fix, kind=Refusal.UNKNOWN_STATE)
        source = files[state_field]
    else:
        try:
            source = json.dumps(state_field)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"no JSON: {str(error)[:200]}"
            raise RequestError.of(where, what, "send a state as JSON") from None
        if len(source) > _MAX_STATE_CHARACTERS:
            what = f"{len(source)} characters, and a request may bring {_MAX_STATE_CHARACTERS}"
            fix = "a state is a few kilobytes: shorten its provenance"
            raise RequestError.of(where, what, fix)
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
    """The state to serve, or the error if it is not safe; computed once per digest."""
    state = decode_state(text)
    budget = min(materialize(state).budget, _CHECKED_BUDGET)
    try:
        return replace_unsafe_state(state, budget)
    except StateError as error:
        return error
