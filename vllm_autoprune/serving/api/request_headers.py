"""Budget and state in HTTP headers, for endpoints whose bodies have no place for them.

``x-autoprune-budget: 64`` is the entry's ``"budget": 64``, ``x-autoprune-state: visionzip`` its
``"state": "visionzip"``. The middleware keeps the headers of a request in a context variable: each
request has a task of its own, and what a task sets no other one sees.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, parse_request
from vllm_autoprune.tpdsl.json_text import escape_unprintable

PREFIX = f"x-{REQUEST_FIELD}"
FIXES = {"budget": 'a number of tokens, such as "64"', "state": "the name of a shipped state"}
"""Fields of the entry that have a header, and what it holds."""

_DROPPING = ("/messages", "/cohere/", "/v2/embed")
"""Parts of paths whose requests vLLM parses without their unknown fields."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(slots=True)
class SentRequest:
    """Headers with our prefix, as sent, and the chunks of a body whose unknown fields are lost."""

    headers: list[tuple[str, str]]
    chunks: list[bytes] = field(default_factory=list)

    def take_body(self) -> object:
        """The body as JSON if a name in it may be ours, None otherwise; kept no longer."""
        body = b"".join(self.chunks)
        self.chunks.clear()
        if b"rune" not in body:
            return None
        try:
            parsed: object = json.loads(body)
        except (ValueError, RecursionError):  # answered by vLLM
            return None
        return parsed


_current: ContextVar[SentRequest | None] = ContextVar("autoprune_request", default=None)


def current_request() -> SentRequest | None:
    """What the request of this task was sent with; None where it did not come over HTTP."""
    return _current.get()


@contextmanager
def handling(sent: SentRequest | None) -> Iterator[None]:
    """Handle a request in this context; None for one that the server makes for itself."""
    token = _current.set(sent)
    try:
        yield
    finally:
        _current.reset(token)


class KeepRequest:
    """ASGI middleware that keeps :class:`SentRequest`; vLLM adds it by ``--middleware``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = ((name.decode("latin-1"), value) for name, value in scope["headers"])
        sent = SentRequest([(n, v.decode("latin-1")) for n, v in names if n.startswith(PREFIX)])

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                sent.chunks.append(message.get("body", b""))
            return message

        keeps = any(part in scope["path"] for part in _DROPPING)
        with handling(sent):
            await self._app(scope, receive_and_keep if keeps else receive, send)


def read_headers(headers: list[tuple[str, str]]) -> dict[str, object]:
    """The fields that headers set; raises RequestError where one is unknown, malformed or twice."""
    fields: dict[str, object] = {}
    problems = []
    for name, text in headers:
        where, known = f"header {escape_unprintable(name, 40)}", name.removeprefix(f"{PREFIX}-")
        if known not in FIXES:
            fix = " or ".join(f"{PREFIX}-{name}" for name in FIXES)
            problems.append(Problem(where, "is not a known header", f"send {fix}"))
        elif known in fields:
            problems.append(Problem(where, "is sent more than once", "send it once"))
        else:
            fields[known] = _parse(known, text)
            if fields[known] is None:
                what = f"is {escape_unprintable(text, 40)!r}"
                problems.append(Problem(where, what, f"give {FIXES[known]}"))
    if problems:
        raise RequestError("request", problems)
    return fields


def _parse(field: str, text: str) -> object:
    """A header's value, None where it is malformed."""
    if field == "state":
        return text or None
    try:
        value: object = json.loads(text)
        parse_request({field: value})
    except (ValueError, RecursionError):
        return None
    return value


def merge_headers(entry: object, fields: dict[str, object]) -> object:
    """The entry of a request with the fields of its headers.

    A field in both places has to have one value: raises RequestError otherwise.
    """
    if not isinstance(entry, dict):
        return fields if entry is None else entry  # no object: refused with a reason of its own
    problems = [
        Problem(f"header {PREFIX}-{name}", "contradicts the body", "send one of the two")
        for name, value in fields.items()
        if entry.get(name) not in (None, value)
    ]
    if problems:
        raise RequestError("request", problems)
    return {**entry, **fields}
