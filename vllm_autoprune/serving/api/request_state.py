"""States in requests, by name or whole: size-limited, safety-checked, cached by digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from vllm_autoprune.errors import Problem, RequestError, StateError
from vllm_autoprune.serving.api.request_fields import ENTRY, MAX_PROBLEMS, request_error
from vllm_autoprune.serving.shared.state_codec import MAX_CACHED_STATES, decode_state, encode_state
from vllm_autoprune.serving.shared.state_safety import CHECKED_REQUEST_BUDGET, replace_unsafe_state
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, require_affordable
from vllm_autoprune.tpdsl.json_text import escape_unprintable
from vllm_autoprune.tpdsl.loading import load_state, shipped_states, suggest_name
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

MAX_STATE_CHARACTERS = 1 << 16
"""Bound of a whole state as JSON; the encoded behaviour has a lower bound of its own."""


def load_request_state(
    state_field: str | Mapping[str, object], cost: float = DEFAULT_COST
) -> PruningState:
    """Load the state that a request names or holds, safety-checked for serving.

    Raises :class:`RequestError`, before the state is run where its selection is predicted to take
    more than ``cost`` milliseconds. A name is looked up among the states that ship and is never a
    path.
    """
    try:
        state = (
            _load_shipped(state_field)
            if isinstance(state_field, str)
            else _parse(_dump(state_field))
        )
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


def _load_shipped(name: str) -> PruningState:
    file = _shipped_files().get(name)
    if file is None:
        what = f"no state of the name {escape_unprintable(name[:80], 80)!r} ships with this server"
        raise request_error("state", what, suggest_name(name[:80], list(_shipped_files())))
    return _read_file(file)


def _dump(state: Mapping[str, object]) -> str:
    try:
        text = json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise request_error(
            "state", f"no JSON: {str(error)[:200]}", "send a state as JSON"
        ) from None
    if len(text) > MAX_STATE_CHARACTERS:
        what = f"{len(text)} characters, and a request may bring {MAX_STATE_CHARACTERS}"
        raise request_error("state", what, "a state is a few kilobytes: shorten its provenance")
    return text


@cache
def _shipped_files() -> dict[str, Path]:
    return shipped_states()


@lru_cache(maxsize=MAX_CACHED_STATES)
def _read_file(file: Path) -> PruningState:
    return load_state(file)


@lru_cache(maxsize=MAX_CACHED_STATES)
def _parse(text: str) -> PruningState:
    return load_state(text)


@lru_cache(maxsize=MAX_CACHED_STATES)
def _check(text: bytes) -> PruningState | StateError:
    """The state to serve, or the error where there is none; computed once a digest."""
    state = decode_state(text)
    try:
        return replace_unsafe_state(state, min(materialize(state).budget, CHECKED_REQUEST_BUDGET))
    except StateError as error:
        return error
