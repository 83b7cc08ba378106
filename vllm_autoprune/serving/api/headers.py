"""Settings in HTTP headers, for endpoints whose bodies cannot carry them.

``x-autoprune-budget: 64`` means the entry's ``"budget": 64``, and ``x-autoprune-state: visionzip``
its ``"state": "visionzip"``. The middleware keeps the headers of a request in a context variable:
each request runs in its own task, whose variables no other task sees.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.request import (
    PruningRequest,
    resembles_entry,
    shorten,
)
from vllm_autoprune.serving.plan import REQUEST_FIELD
from vllm_autoprune.tpdsl.tokens import POSITIONS

_PREFIX = f"x-{REQUEST_FIELD}"
HEADERS = {
    f"{_PREFIX}-budget": 'a budget, such as "64" or "1/8"',
    f"{_PREFIX}-cells": 'a rule such as "flat" or "changed", or "none"',
    f"{_PREFIX}-enabled": '"true" or "false"',
    f"{_PREFIX}-history": 'a rule such as "2:1/8", or "none"',
    f"{_PREFIX}-positions": f"one of {', '.join(POSITIONS)}",
    f"{_PREFIX}-state": "the name of a shipped state",
    f"{_PREFIX}-tower": 'a rule such as "2/3@1/3", or "none"',
    f"{_PREFIX}-video-budget": 'a budget, such as "tokens_per_frame:16" or "1/8"',
}
"""The headers, each named like its field of the entry, and their values in words."""

_NAMES = frozenset({"cells", "history", "positions", "state", "tower"})
"""Fields whose header holds a text; the headers of other fields hold JSON, or a budget as text."""

Headers = Sequence[tuple[str, str]]
"""Headers with the plugin's names, or similar names, as sent."""

_headers: ContextVar[Headers] = ContextVar("autoprune_headers", default=())
"""Headers of the request that this task handles; empty if it did not come over HTTP."""


@contextmanager
def handling(headers: Headers) -> Iterator[None]:
    """Handle a request with these headers in this context."""
    token = _headers.set(headers)
    try:
        yield
    finally:
        _headers.reset(token)


def current_headers() -> Headers:
    """Headers of the request that this task handles."""
    return _headers.get()


class KeepHeaders:
    """ASGI middleware that keeps the plugin's headers of a request; ``--middleware`` adds it."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], *channels: object) -> None:
        """Handle one connection (ASGI)."""
        headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
        pairs = [
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in headers
        ]
        with handling([pair for pair in pairs if resembles_entry(pair[0])]):
            await self._app(scope, *channels)


def join_headers(entry: object, headers: Headers) -> object:
    """The entry of a request, completed with the fields that its headers set.

    Raises RequestError if a header is unknown, malformed or sent twice, or if the entry already has
    that field with another value.
    """
    fields: dict[str, object] = {}
    for header, text in headers:
        where = f"header {shorten(header)}"
        if header not in HEADERS:
            # Names with underscores are refused too: a proxy that strips headers of its clients
            # must know all names that have an effect.
            raise RequestError.of(
                where, "is not a known header", f"send {' or '.join(HEADERS)}"
            )
        name = header.removeprefix(f"{_PREFIX}-").replace("-", "_")
        if name in fields:
            raise RequestError.of(where, "is sent more than once", "send it once")
        value: object = text
        if name not in _NAMES:
            with suppress(ValueError, RecursionError):  # a share such as 1/8 is no JSON
                value = json.loads(text)
        try:
            parsed = PruningRequest.parse({name: value})
        except RequestError:
            value = None
        if value in (None, ""):
            raise RequestError.of(
                where, f"is {shorten(text)!r}", f"give {HEADERS[header]}"
            )
        in_body = entry.get(name) if isinstance(entry, dict) else None
        if in_body is not None and PruningRequest.parse({name: in_body}) != parsed:
            raise RequestError.of(where, "contradicts the body", "send one of the two")
        fields[name] = value
    if entry is None:
        return fields or None
    return {**entry, **fields} if isinstance(entry, dict) else entry
