"""HTTP clients of a running `vllm serve`: models, metrics, chat requests, streams, and what failed.

Everything that a request to a server can raise becomes a :class:`Problem` that names the server and
says what to do (:func:`describe_failure`). ``VLLM_API_KEY`` is sent where it is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_autoprune.errors import AutopruneError, ConfigError, EvaluationFailed, Problem

MAX_IN_FLIGHT = 128
"""Concurrent requests a server. On two cores an answer took 16 ms of processor time with 128, 23 ms
with 32 and 45 ms with one, because requests share the cost of an engine step."""

CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Long, because a request may wait for all others that are in flight."""
_CHECK_TIMEOUT = 30.0
"""For the list of models, which tells whether a server is alive."""
_RETRIED = (408, 429)
"""Client errors that another attempt may not meet."""

_FORMAT = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What reading an answer raises that is not JSON, or has other fields."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, *_FORMAT)
"""What a request to a server, and reading its answer, can raise."""


class RequestRefused(EvaluationFailed):
    """A server answered with a status that another attempt cannot change."""


class ServerLost(AutopruneError):
    """No server answers any more, so that no further request can succeed."""


class Metrics:
    """One answer of ``/metrics``; raises ValueError for text of another format."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def since(self, earlier: Metrics) -> Metrics:
        """What every counter and histogram has gained since an earlier page."""
        gained = Metrics("")
        for name, samples in self._samples.items():
            before = earlier._samples.get(name, ())
            gained._samples[name] = [
                (labels, value - sum(old for other, old in before if other == labels))
                for labels, value in samples
            ]
        return gained

    def total(self, name: str, **labels: str) -> float | None:
        """One metric, summed over the samples with these labels; None where there is none."""
        samples = self._samples.get(name, ())
        values = [value for present, value in samples if labels.items() <= present.items()]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        """Mean of a histogram; None where it has no value yet."""
        total, count = self.total(f"{name}_sum"), self.total(f"{name}_count")
        return total / count if total is not None and count else None

    def label(self, name: str, label: str) -> str | None:
        """A label's value in the first sample of a metric."""
        return next((labels.get(label) for labels, _ in self._samples.get(name, ())), None)


EMPTY = "the answer contains no text"
"""Error of a stream without output: a failure where a first token is timed, else a wrong answer."""
_KEPT_TEXT = 400
"""Characters of an answer that a stream keeps."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""Fields of thoughts: of vLLM 0.32, and of others."""


class _Stream(NamedTuple):
    """What a streamed answer contains."""

    deltas: tuple[float, ...]
    """Arrival of each delta with output: thoughts, text, a refusal or a tool call."""
    thoughts: int
    """How many of them come before the first of the answer."""
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    error: str | None
    """What is wrong with it, in a line."""


def parse_stream(
    reads: Sequence[tuple[float, bytes]], end: str = "the stream ended without [DONE]"
) -> _Stream:
    """The server-sent events in the pieces of an answer, and the times they were read at.

    To be called after the stream has ended, because parsing between two reads would delay the time
    stamp of the next. A delta counts from its output: the first chunk of a chat, which only names
    the role, does not. ``end``: how the stream ended, for one that was not finished.
    """
    events, framed, stray = _split_events(reads)
    if stray and not framed:
        body = b"".join(piece for _, piece in reads).decode(errors="replace")
        events = [(reads[-1][0], body, _parse_object(body))]
    deltas, text, errors, usage = list[float](), list[str](), list[str](), dict[str, int]()
    thoughts, answered, finished = 0, False, False
    for arrived, data, chunk in events:
        if data.strip() in ("", "[DONE]"):
            finished = finished or bool(data.strip())
            continue
        if chunk is None:
            what = "an event is not a JSON object" if framed else "the answer is not a stream"
            errors.append(f"{what}: {data[:80]}")
            continue
        choices = _list_objects(chunk.get("choices"))
        # Only a chunk without choices is an error as vLLM and FastAPI write it.
        names = ("error",) if choices else ("error", "message", "detail")
        for failure in filter(None, map(chunk.get, names)):
            message = failure.get("message") if isinstance(failure, dict) else failure
            errors.append(str(message or failure))
        # Most servers count in the last chunk, some in every one, some in the choice.
        for counts in _list_objects([holder.get("usage") for holder in (chunk, *choices)]):
            for name in ("prompt_tokens", "completion_tokens"):
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    usage[name] = int(counts.get(name, ""))
            finished = finished or not choices
        thinks = answers = False
        for choice in choices:
            finished = finished or bool(choice.get("finish_reason"))
            if choice.get("finish_reason") in ("error", "abort"):
                errors.append(f"the server ended the answer: {choice['finish_reason']}")
            message = choice.get("delta") or (None if deltas else choice.get("message"))
            if isinstance(message, dict):
                answer, thought = read_message(message)
                thinks = thinks or bool(thought)
                answers = answers or any((answer, message.get("tool_calls")))
                text.append("" if choice.get("index") else answer)
        if thinks or answers:
            deltas.append(arrived)
            answered = answered or answers
            thoughts += not answered
    if deltas and not framed:
        errors.append("the answer is not a stream, so that its first token cannot be timed")
    if not finished:
        errors.append(f"the answer was cut short: {end}{stray and f', after: {stray[:80]}'}")
    error = [*errors, None if deltas else EMPTY][0]
    return _Stream(
        tuple(deltas),
        thoughts,
        "".join(text)[:_KEPT_TEXT].encode(errors="replace").decode(),
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        error and " ".join(error.split())[:200].encode(errors="replace").decode(),
    )


def read_message(message: Mapping[str, object]) -> tuple[str, str]:
    """Answer and thoughts of a chat message or of a delta of one; a refusal is an answer.

    Content may be a list of parts, where some servers put the thoughts too.
    """
    content = message.get("content")
    thoughts = [next((message[name] for name in _THOUGHTS if message.get(name)), None)]
    answer = list[object]()
    for part in content if isinstance(content, list) else [content]:
        thinks = isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")
        (thoughts if thinks else answer).append(part)
    return _join_text(answer) or _join_text(message.get("refusal")), _join_text(thoughts)


def _join_text(value: object, depth: int = 4) -> str:
    """Text of a field: the field itself, a part, or a list of either."""
    if isinstance(value, dict):
        value = value.get("text") or value.get("thinking")
    if isinstance(value, list) and depth:
        return "".join(_join_text(item, depth - 1) for item in value)
    return value if isinstance(value, str) else ""


def _split_events(
    reads: Sequence[tuple[float, bytes]],
) -> tuple[list[tuple[float, str, dict[str, Any] | None]], bool, str]:
    """Arrival, data and JSON object of each event; whether there is data; a line that has none.

    Lines end in LF, CR or CRLF, also between reads, and arrive with the read that completes them.
    Lines of data which are no JSON together are events of their own, and what is left at the end
    is an event unless it was cut.
    """
    ends = [*accumulate(len(piece) for _, piece in reads)]
    events = list[tuple[float, str, dict[str, Any] | None]]()
    lines, framed, stray, offset = list[tuple[float, str]](), False, "", 0
    body = b"".join(piece for _, piece in reads)
    for line in (*body.splitlines(keepends=True), b""):
        content = line.rstrip(b"\r\n")
        field, _, value = content.decode("utf-8-sig", errors="replace").partition(":")
        if field == "data":
            completed = min(bisect_right(ends, offset + len(content)), len(reads) - 1)
            lines.append((reads[completed][0], value.removeprefix(" ")))
            framed = True
        elif field not in ("", "event", "id", "retry"):
            stray = stray or content.decode(errors="replace")
        elif not content and lines:
            data = "\n".join(value for _, value in lines)
            chunk = _parse_object(data)
            if chunk is not None or len(lines) == 1:
                lines = [(lines[-1][0], data)]
            split = [(arrived, value, chunk or _parse_object(value)) for arrived, value in lines]
            if not line and split[-1][2] is None and split[-1][1].strip() != "[DONE]":
                stray = split.pop()[1]
            events += split
            lines = []
        offset += len(line)
    return events, framed, stray


def _parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, if it is one."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def _list_objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list, if it is one."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def server_address(url: str) -> str:
    """The address without ``/v1`` and closing slashes."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _settings() -> dict[str, Any]:
    """Timeouts and headers of every client."""
    key = os.environ.get("VLLM_API_KEY")
    return {"timeout": _TIMEOUT, "headers": {"Authorization": f"Bearer {key}"} if key else {}}


class ServerClient:
    """Client of one server; a context manager whose errors are of :data:`FAILURES`."""

    def __init__(self, url: str) -> None:
        """``url`` with or without ``/v1``."""
        self.url = server_address(url)
        self.http = httpx.Client(**_settings())

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def list_models(self) -> dict[str, int]:
        """Names of the served models, at least one, with the context each has; 0: not told."""
        return _read_models(self.http.get(self.url + _MODELS, timeout=_CHECK_TIMEOUT))

    def read_metrics(self) -> Metrics | None:
        """``/metrics``; None where the server has none."""
        answer = self.http.get(f"{self.url}/metrics")
        return Metrics(answer.text) if answer.is_success else None

    def chat(self, body: Mapping[str, object]) -> dict[str, Any]:
        """The answer to a chat request; :class:`RequestRefused` where the server refuses it."""
        return _read_answer(self.http.post(self.url + CHAT, json=body))


class AsyncServerClient:
    """Client of one server for many concurrent requests; its errors are of :data:`FAILURES`."""

    def __init__(self, url: str, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        """``url`` with or without ``/v1``; requests beyond ``max_in_flight`` wait in order."""
        self.url = server_address(url)
        # One connection a client: httpx scans all connections of a client for every request, which
        # took longer than the model with 128 of them.
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        settings = _settings() | {"verify": httpx.create_ssl_context()}
        for _ in range(max_in_flight):
            self._free.put_nowait(httpx.AsyncClient(**settings))

    async def list_models(self) -> dict[str, int]:
        """As :meth:`ServerClient.list_models`."""
        async with self._client() as client:
            return _read_models(await client.get(self.url + _MODELS, timeout=_CHECK_TIMEOUT))

    async def chat(self, body: Mapping[str, object]) -> dict[str, Any]:
        """As :meth:`ServerClient.chat`."""
        async with self._client() as client:
            return _read_answer(await client.post(self.url + CHAT, json=body))

    async def close(self) -> None:
        """Close all connections that are not in use."""
        while not self._free.empty():
            await self._free.get_nowait().aclose()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        client = await self._free.get()
        try:
            yield client
        finally:
            self._free.put_nowait(client)


async def chat_with_retries(
    servers: Sequence[AsyncServerClient],
    body: Mapping[str, object],
    attempts: int = 4,
    first_wait: float = 1.0,
) -> dict[str, Any]:
    """The answer to a chat request, from the next of the servers after each failure.

    Waits ``first_wait`` seconds before the second attempt, twice as long before each further one.
    Raises :class:`RequestRefused`, :class:`EvaluationFailed` after the last attempt, and
    :class:`ServerLost` where no server answers any more.
    """
    failure = ""
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(first_wait * 2 ** (attempt - 1))
        try:
            return await servers[attempt % len(servers)].chat(body)
        except FAILURES as error:
            failure = f"{type(error).__name__}: {error}"[:300]
    for server in servers:
        with contextlib.suppress(*FAILURES):
            await server.list_models()
            raise EvaluationFailed(f"{failure}, after {attempts} attempts")
    addresses = ", ".join(server.url for server in servers)
    raise ServerLost(f"{addresses} stopped answering ({failure})")


def choose_model(url: str, models: Mapping[str, int], wanted: str | None = None) -> str:
    """The wanted model or else the first; :class:`ConfigError` where it is not served."""
    if wanted is not None and wanted not in models:
        what = f"serves {', '.join(models)}"
        raise ConfigError("server", [Problem(url, what, f"serve {wanted}, or name a served model")])
    return wanted or next(iter(models))


@contextlib.contextmanager
def reporting_failures(url: str) -> Iterator[None]:
    """Raise what a request to a server raises as a :class:`ConfigError`."""
    try:
        yield
    except (*FAILURES, RequestRefused) as error:
        raise ConfigError("server", [describe_failure(url, error)]) from None


def describe_failure(url: str, error: Exception) -> Problem:
    """Why a server cannot be used, by what a request to it raised, and what to do."""
    fix = "give the address of a vllm serve, such as http://localhost:8000"
    match error:
        case httpx.InvalidURL() | httpx.UnsupportedProtocol():
            what, fix = "is not the address of a server", "give it as http://HOST:PORT"
        case httpx.HTTPStatusError():
            what = f"answers with {describe_rejection(error.response)}"
            if error.response.status_code in (401, 403):
                fix = "set VLLM_API_KEY to the key that the server asks for"
            elif error.response.is_server_error:
                fix = "look into the server's log"
        case httpx.HTTPError():
            what = f"does not answer ({type(error).__name__})"
            fix = "start the server, or correct its address"
        case RequestRefused():
            what = f"refuses a chat request: {error}"
            fix = "set VLLM_API_KEY where the server asks for a key, or look into its log"
        case _:
            what = f"answers in an unknown format ({type(error).__name__}: {error})"[:200]
    return Problem(url, what, fix)


def describe_rejection(response: httpx.Response) -> str:
    """Status and message of a response that is an error, on one line."""
    text = response.text
    with contextlib.suppress(*_FORMAT):
        text = str(response.json()["error"]["message"])
    return f"status {response.status_code}: {' '.join(text.split())[:400]}"


def _read_models(response: httpx.Response) -> dict[str, int]:
    data = response.raise_for_status().json()["data"]
    if not data:
        raise ValueError("lists no model at /v1/models")
    return {str(model["id"]): int(model.get("max_model_len") or 0) for model in data}


def _read_answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_client_error and response.status_code not in _RETRIED:
        raise RequestRefused(describe_rejection(response))
    answer = response.raise_for_status().json()
    if not isinstance(answer, dict):
        raise TypeError("an answer is no JSON object")
    return answer
