"""Pruning fields of a request that stand where nothing reads them, answered instead of ignored."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.api.metrics import count_refused_request
from vllm_autoprune.serving.api.request_fields import (
    REQUEST_FIELD,
    PruningRequest,
    format_entry,
    parse_request,
)
from vllm_autoprune.serving.api.request_headers import (
    PREFIX,
    current_request,
    merge_headers,
    read_headers,
)
from vllm_autoprune.serving.shared.request_rules import FLAG, RequestRules
from vllm_autoprune.serving.shared.served_state import served_state
from vllm_autoprune.tpdsl.json_text import escape_unprintable

if TYPE_CHECKING:
    from pydantic import BaseModel
    from vllm.config import ModelConfig

KWARGS = "mm_processor_kwargs"
_CLIENT_FIX = "send {entry} (extra_body={{{entry}}} in the OpenAI client)"
_HEADER_FIX = f"send the header {PREFIX}-budget: 64, or {PREFIX}-state: NAME"
OFFLINE_FIX = "put {entry} into the prompt's dict, or mm_processor_kwargs into LLM.chat's arguments"
"""What to write, where it is not a request of OpenAI's form."""

MAX_NAME = 100
"""Length of a key above which it is none of ours: seen keys are remembered."""

_NAMED_BY_CLIENTS = frozenset(
    {
        *("arguments", "function", "function_call", "functions", "guided_json", "input_schema"),
        *("json_schema", "metadata", "parameters", "response_format", "schema"),
        *("structured_outputs", "tool_calls", "tool_choice", "tools"),
    }
)
"""Fields whose content has names of the client's own: tools, schemas, notes."""


def check_request(model_config: ModelConfig, request: BaseModel, trusted: bool) -> None:
    """Raise :class:`RequestError` where a request's pruning fields would have no effect.

    What its headers set is written into its ``mm_processor_kwargs``. ``trusted`` is
    ``--trust-request-mm-kwargs``.
    """
    served = served_state(model_config)
    if served is None:
        return
    try:
        _check_fields(request, served.rules, trusted)
    except RequestError:
        count_refused_request()
        raise


def _check_fields(request: BaseModel, rules: RequestRules, trusted: bool) -> None:
    declared: object = getattr(request, KWARGS, None) or {}
    if not isinstance(declared, Mapping):
        return  # completions do not declare it: refused by vLLM
    kwargs: Mapping[str, object] = declared
    sent = current_request()
    body = None if sent is None else sent.take_body()
    if body is None:
        refuse_misplaced({**vars(request), **(request.model_extra or {})}, kwargs)
    else:  # of an endpoint that reads headers alone
        refuse_misplaced(body, {}, _HEADER_FIX)
    if REQUEST_FIELD in kwargs:
        parse_request(kwargs[REQUEST_FIELD])
    fields = {} if sent is None else read_headers(sent.headers)
    if fields:
        kwargs = {**kwargs, REQUEST_FIELD: merge_headers(kwargs.get(REQUEST_FIELD), fields)}
        vars(request)[KWARGS] = kwargs  # not every request declares it
    if REQUEST_FIELD in kwargs and not (trusted or rules.explicit):
        where = f"header {PREFIX}-{next(iter(fields))}" if fields else f"{KWARGS}/{REQUEST_FIELD}"
        what = f"this server's requests may set nothing, because no {FLAG} is given"
        fix = f"leave it out, or serve with {FLAG} budget"
        raise RequestError("request", [Problem(where, what, fix)])


def refuse_misplaced(fields: object, kwargs: Mapping[str, object], fix: str = _CLIENT_FIX) -> None:
    """Raise :class:`RequestError` with the first pruning field that nothing reads.

    ``fields`` are those of a request, or of an offline prompt; ``kwargs`` what is read of its
    ``mm_processor_kwargs``, where it may have an entry.
    """
    problem = find_misplaced_field(fields, kwargs, fix)
    if problem is not None:
        raise RequestError("request", [problem])


def find_misplaced_field(
    fields: object, kwargs: Mapping[str, object], fix: str = _CLIENT_FIX
) -> Problem | None:
    """The first pruning field beside the entry, or at any depth outside the kwargs."""
    for key in kwargs:
        where = f"{KWARGS}/{_shorten(key)}"
        if key in PruningRequest.model_fields:
            return Problem(where, "is not read there", f"put it one level down: {_entry()}")
        if key != REQUEST_FIELD and _is_entry(key):
            return Problem(where, "is not a known entry", f"did you mean {REQUEST_FIELD!r}?")
    waiting: list[tuple[tuple[object, ...], object]] = [((), fields)]
    while waiting:
        place, value = waiting.pop()
        children: Iterable[tuple[object, object]]
        if isinstance(value, Mapping):
            children = value.items()
        elif isinstance(value, list | tuple) and not isinstance(next(iter(value), 0), int | float):
            children = enumerate(value)  # token ids have no names
        else:
            continue
        inside = place[-1] if place else ""
        for name, child in children:
            if child is None or (name == KWARGS and kwargs and not place):
                continue
            if isinstance(name, str) and _is_misplaced(inside, name, child):
                where = "/".join(_shorten(str(step)) for step in (*place, name))
                what = "is ignored there" if place else "is ignored at the top of a request"
                return Problem(where[-200:], what, fix.format(entry=_entry(child)))
            of_tool = name in _NAMED_BY_CLIENTS or (name == "input" and isinstance(child, dict))
            if isinstance(child, dict | list | tuple) and not of_tool:
                waiting.append(((*place, name), child))
    return None


def _is_misplaced(inside: object, name: str, child: object) -> bool:
    """Whether a field is an entry, or the budget of an image or of ignored kwargs."""
    if inside == KWARGS and name in PruningRequest.model_fields:
        return True
    if name == "budget" and inside == "image_url":
        return isinstance(child, int | list | dict)
    return _is_entry(name)


def _is_entry(name: object) -> bool:
    """Whether a key is the entry's name, one with more behind it, or nearly so."""
    return isinstance(name, str) and len(name) <= MAX_NAME and _resembles_entry(name)


@lru_cache(maxsize=1024)
def _resembles_entry(name: str) -> bool:
    if name.startswith("_"):
        return False
    word = name.lower().replace("-", "").replace("_", "").removeprefix("x")
    return word.startswith(REQUEST_FIELD) or word in _NEAR


def _misspellings(word: str) -> frozenset[str]:
    """The word with one letter missing, changed, added or exchanged with the next one."""
    splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    letters = ("", *string.ascii_lowercase)
    changed = {a + c + b[1:] for a, b in splits if b for c in letters}
    added = {a + c + b for a, b in splits for c in letters}
    swapped = {a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1}
    return frozenset(changed | added | swapped)


_NEAR = _misspellings(REQUEST_FIELD)


def _entry(value: object = None) -> str:
    return f'"{KWARGS}": {{"{REQUEST_FIELD}": {format_entry(value)}}}'


def _shorten(name: str) -> str:
    return escape_unprintable(name, 40)
