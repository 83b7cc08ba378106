"""Canonical bytes of a state, for the plans that carry it to the workers.

A state is sent with every image that needs it, because an API server cannot know which states a
worker has already received. It takes a kilobyte, which is small compared with the pixels.
"""

from __future__ import annotations

from functools import lru_cache

from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.state import Provenance, PruningState

MAX_STATE_BYTES = 1 << 14
"""Maximum size of the state in a plan, in bytes; shipped states take 1,200."""

MAX_CACHED_STATES = 256
"""Number of states that a process caches; the least recently used is dropped first."""


@lru_cache(maxsize=MAX_CACHED_STATES)
def encode_state(state: PruningState) -> bytes:
    """Encode the fields that determine behaviour, so that equal digests give equal bytes.

    Raises :class:`StateError` for a state larger than MAX_STATE_BYTES.
    """
    bare = {"name": state.digest[:12], "provenance": Provenance(), "schema_uri": ""}
    copy = state.model_copy(update=bare)
    text = copy.model_dump_json(exclude={"provenance"}).encode()
    if len(text) > MAX_STATE_BYTES:
        allowed = f"a request may bring {MAX_STATE_BYTES}"
        what = f"{len(text)} bytes of behaviour, and {allowed}"
        fix = "use fewer signals or pools"
        raise StateError.of("", what, fix, kind="size", subject="state")
    return text


@lru_cache(maxsize=MAX_CACHED_STATES)
def decode_state(text: bytes) -> PruningState:
    """Inverse of :func:`encode_state`, up to name and provenance."""
    return PruningState.model_validate_json(text)
