"""The streaming client of all benchmarks, the record of a request, and the journal of records.

Every read of the socket is stamped; server-sent events are parsed after the stream has ended,
because parsing between two reads would delay the time stamp of the next. It is the one client that
is not httpx: with 8 requests of 400 kB and 16 deltas at once on two cores, httpx took 1.6 ms of
processor time a request, ``http.client`` 0.8, and the first token was stamped 0.5 ms later. Under
locust ``socket`` is gevent's, so that a thousand requests wait in one thread.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from benchmarks.common import BenchmarkError, StrictModel
from vllm_autoprune.record_file import read_records

PATH = "/v1/chat/completions"
EMPTY = "the answer contains no text"
"""A failure in a load test, which needs a first token; where answers are scored, a wrong answer."""
_READ_SIZE = 1 << 16
_KEPT_TEXT = 400
"""Characters of an answer that are kept, to compare servers by what they answer."""

Phase = Literal["warm-up", "ramp", "measured", "drain"]


class Record(StrictModel):
    """One request. Times are seconds of a monotonic clock since the start of the schedule."""

    index: int
    """Its place in the workload: the same request has the same index in every run."""
    phase: Phase = "measured"
    worker: int = 0
    scheduled: float
    """When it was due; in a closed loop, when the request before it was answered."""
    started: float
    """When the client began with it; ``started - scheduled`` is the client's own delay."""
    connected: float | None = None
    sent: float | None = None
    """When the last byte of the body was handed to the kernel."""
    headers: float | None = None
    deltas: tuple[float, ...] = ()
    """Arrival of each delta with text; the first of them ends the time to first token."""
    done: float
    """When the stream ended, or the request failed."""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    images: int = 1
    body_bytes: int = 0
    text: str = ""
    error: str | None = None
    """What went wrong, in a line; None where the request was answered."""

    @property
    def ok(self) -> bool:
        """Whether the request was answered with text; only then it has latencies."""
        return self.error is None

    @property
    def delay(self) -> float:
        """Seconds by which the client itself was late."""
        return self.started - self.scheduled

    @property
    def ttft(self) -> float:
        """Seconds from the moment the request was due to its first text."""
        return self.deltas[0] - self.scheduled

    @property
    def e2e(self) -> float:
        """Seconds from the moment the request was due to its last text."""
        return self.deltas[-1] - self.scheduled

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between deltas; a delta may hold more than one token."""
        return tuple(b - a for a, b in pairwise(self.deltas))

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, by the server's count of tokens; None for one token."""
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.deltas[-1] - self.deltas[0]) / (self.completion_tokens - 1)


_RECORD = TypeAdapter(Record)


class Journal:
    """A JSONL file of records, and all of them in memory, whether or not they could be written.

    Unlike ``RecordFile`` it does not wait for the disk: that would delay the time stamps of a load
    client in the same process.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self.failure: str | None = None
        """Why the file is not complete."""
        self._file: TextIOWrapper | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        except OSError as error:
            self.failure = str(error)

    def add(self, record: Record) -> None:
        """Append one record; where that fails it is kept in memory, and ``failure`` is set."""
        self.records.append(record)
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            self.failure = str(error)

    def close(self) -> None:
        """Close the file; on a full disk, what is left in its buffer is lost."""
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or str(error)
        self._file = None


def read_journal(path: Path) -> list[Record]:
    """All records of a file, by index; an incomplete last line is ignored.

    Raises :class:`BenchmarkError` where the file cannot be read or contains anything else.
    """
    fix = "name the folder of a finished run"
    records = read_records(path, _RECORD, BenchmarkError, fix)
    return sorted(records, key=lambda record: record.index)


def answered(records: Iterable[Record]) -> list[Record]:
    """The records of requests that were answered."""
    return [record for record in records if record.ok]


Clock = Callable[[], float]
Read = tuple[float, bytes]
"""When a piece was read from the socket, and the piece."""


@dataclass(frozen=True)
class Stream:
    """Content and timestamps of a streamed chat completion."""

    deltas: tuple[float, ...]
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    finished: bool
    """Whether the server sent ``[DONE]``."""
    error: str | None


@dataclass
class _Exchange:
    connected: float | None = None
    sent: float | None = None
    headers: float | None = None
    status: int = 0
    reads: list[Read] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """Sends requests to one server, each on a connection of its own.

    ``clock`` gives seconds since the start of the schedule; ``timeout`` is per read, in seconds.
    """

    url: str
    clock: Clock = time.perf_counter
    timeout: float = 300.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def send(
        self,
        body: bytes,
        *,
        index: int = 0,
        scheduled: float | None = None,
        phase: Phase = "measured",
        worker: int = 0,
        images: int = 1,
    ) -> Record:
        """The record of one request; whatever goes wrong is in its ``error``."""
        started = self.clock()
        exchange, failure = _Exchange(), None
        try:
            failure = self._exchange(body, exchange)
        except (OSError, http.client.HTTPException) as error:
            when = "the answer was cut short" if exchange.reads else "no answer"
            failure = f"{when}: {type(error).__name__}: {error}"
        done = self.clock()
        stream = parse(exchange.reads) if exchange.status == 200 else None
        if stream is not None and failure is None:
            failure = stream.error or _find_missing_part(stream.text, stream.finished)
        return Record(
            index=index,
            phase=phase,
            worker=worker,
            scheduled=started if scheduled is None else scheduled,
            started=started,
            connected=exchange.connected,
            sent=exchange.sent,
            headers=exchange.headers,
            deltas=stream.deltas if stream else (),
            done=done,
            status=exchange.status,
            prompt_tokens=stream.prompt_tokens if stream else None,
            completion_tokens=stream.completion_tokens if stream else None,
            cached_tokens=stream.cached_tokens if stream else None,
            images=images,
            body_bytes=len(body),
            text=stream.text[:_KEPT_TEXT] if stream else "",
            error=failure,
        )

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(parts.netloc, timeout=self.timeout)

    @property
    def _path(self) -> str:
        return urlsplit(self.url).path.rstrip("/") + PATH

    @property
    def _all_headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Connection": "close", **self.headers}

    def _exchange(self, body: bytes, exchange: _Exchange) -> str | None:
        """Fill in the time stamps; a line about what the server refused, or None."""
        with closing(self._connection()) as connection:
            connection.connect()
            exchange.connected = self.clock()
            connection.request("POST", self._path, body, self._all_headers)
            exchange.sent = self.clock()
            answer = connection.getresponse()
            exchange.headers, exchange.status = self.clock(), answer.status
            if answer.status != 200:
                text = answer.read(2000).decode(errors="replace")
                return f"status {answer.status}: {' '.join(text.split())[:200]}"
            # read1 returns what one read of the socket gave, at most one chunk of the transfer.
            while piece := answer.read1(_READ_SIZE):
                exchange.reads.append((self.clock(), piece))
        return None


def build_content(question: str, urls: Iterable[str] = ()) -> list[Mapping[str, object]]:
    """The parts of a user's message: images, then the question."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": question}]


def build_body(
    model: str,
    content: Sequence[Mapping[str, object]],
    *,
    tokens: int,
    stream: bool = True,
    fields: Mapping[str, object] | None = None,
) -> bytes:
    """A greedy chat request for at most ``tokens`` tokens; a stream ends with the usage.

    ``fields`` are added to the body.
    """
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**body, **(fields or {})}).encode()


def _find_missing_part(text: str, finished: bool) -> str | None:
    if not finished:
        return "the answer was cut short: the stream ended without [DONE]"
    return None if text else EMPTY


def parse(reads: Sequence[Read]) -> Stream:
    """The content of a stream; each event gets the time of the read that completed it.

    A delta counts from its text: the first chunk of a chat, which only names the role, does not.
    """
    deltas: list[float] = []
    text: list[str] = []
    usage: dict[str, object] = {}
    finished, error = False, None
    for arrived, data in _events(reads):
        if data == "[DONE]":
            finished = True
            continue
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            chunk = None
        if not isinstance(chunk, dict):
            error = error or f"an event is not a JSON object: {data[:80]}"
            continue
        if "error" in chunk:
            error = error or _error_message(chunk["error"])
        usage = chunk.get("usage") or usage
        content = "".join(_content(choice) for choice in chunk.get("choices") or ())
        if content:
            deltas.append(arrived)
            text.append(content)
    details = usage.get("prompt_tokens_details")
    return Stream(
        deltas=tuple(deltas),
        text="".join(text),
        prompt_tokens=_integer(usage.get("prompt_tokens")),
        completion_tokens=_integer(usage.get("completion_tokens")),
        cached_tokens=_integer(details.get("cached_tokens")) if isinstance(details, dict) else None,
        finished=finished,
        error=error,
    )


def _events(reads: Sequence[Read]) -> Iterator[tuple[float, str]]:
    """Time and data of each server-sent event; an empty line ends one, which may span reads."""
    rest = b""
    for arrived, piece in reads:
        rest += piece.replace(b"\r\n", b"\n")
        *complete, rest = rest.split(b"\n\n")
        for event in complete:
            lines = event.decode(errors="replace").split("\n")
            data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
            if data:
                yield arrived, "\n".join(data)


def _content(choice: object) -> str:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return str(delta.get("content") or "") if isinstance(delta, dict) else ""


def _error_message(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
