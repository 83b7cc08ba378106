"""Pruning fields of a request that stand where nothing reads them, answered instead of ignored."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, PruningRequest
from vllm_autoprune.serving.shared.request_rules import FLAG, RequestRules
from vllm_autoprune.serving.shared.served_state import served_state
from vllm_autoprune.tpdsl.states.json_values import escape_unprintable

if TYPE_CHECKING:
    from vllm.config import ModelConfig

KWARGS = "mm_processor_kwargs"
_PLACE = f'"{KWARGS}": {{"{REQUEST_FIELD}": {{"budget": 64}}}}'
_CLIENT = f"extra_body={{{_PLACE}}} in the OpenAI client"

MAX_NAMES = 100
"""Names compared with the entry's, the first ones: all requests wait while one is checked."""


def check_request(
    model_config: ModelConfig,
    extra: Mapping[str, object],
    kwargs: Mapping[str, object],
    trusted: bool,
) -> None:
    """Raise :class:`RequestError` where a request's pruning fields would have no effect.

    ``extra`` are the fields of the request that vLLM does not know, and would ignore. ``trusted``
    is ``--trust-request-mm-kwargs``.
    """
    served = served_state(model_config)
    if served is None:
        return
    problem = find_misplaced_field(extra, kwargs)
    if problem is None and REQUEST_FIELD in kwargs and not trusted:
        problem = _find_forbidden_entry(served.rules)
    if problem is not None:
        raise RequestError("request", [problem])


def find_misplaced_field(
    extra: Mapping[str, object], kwargs: Mapping[str, object]
) -> Problem | None:
    """The first pruning field at the top of a request, or beside the entry in its kwargs."""
    for name in islice(extra, MAX_NAMES):
        if _is_entry(name):
            what = "is ignored at the top of a request"
            return Problem(_shorten(name), what, f"send {_PLACE} ({_CLIENT})")
    for name in islice(kwargs, MAX_NAMES):
        where = f"{KWARGS}/{_shorten(name)}"
        if name in PruningRequest.model_fields:
            return Problem(where, "is not read there", f"put it one level down: {_PLACE}")
        if name != REQUEST_FIELD and _is_entry(name):
            return Problem(where, "is not a known entry", f"did you mean {REQUEST_FIELD!r}?")
    return None


def _is_entry(name: object) -> bool:
    """Whether a key is the entry's name, or nearly so."""
    if not isinstance(name, str) or len(name) > 100:
        return False
    word = name.lower().replace("-", "").replace("_", "")
    return word.startswith(REQUEST_FIELD) or bool(
        difflib.get_close_matches(word, [REQUEST_FIELD], cutoff=0.8)
    )


def _find_forbidden_entry(rules: RequestRules) -> Problem | None:
    """The problem of an entry that vLLM refuses because no flag lets requests have one."""
    if rules.explicit:
        return None
    what = f"this server's requests may set nothing, because no {FLAG} is given"
    return Problem(f"{KWARGS}/{REQUEST_FIELD}", what, f"leave it out, or serve with {FLAG} budget")


def _shorten(name: str) -> str:
    return escape_unprintable(name, 40)
