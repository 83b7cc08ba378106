"""The streaming client of all benchmarks, the record of a request, and the journal of records.

Every read of the socket is stamped; server-sent events are parsed after the stream has ended,
because parsing between two reads would delay the time stamp of the next. It is the one client that
is not httpx: with 8 requests of 400 kB and 16 deltas at once on two cores, httpx took 1.6 ms of
processor time a request, ``http.client`` 0.8, and the first token was stamped 0.5 ms later. Under
locust ``socket`` is gevent's, so that a thousand requests wait in one thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
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


class Answer(StrictModel):
    """What a streamed chat completion contains."""

    deltas: tuple[float, ...] = ()
    """Arrival of each delta with text; the first of them ends the time to first token."""
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    """What went wrong, in a line; None where the request was answered."""


class Record(Answer):
    """One request. Times are seconds of a monotonic clock since the start of the schedule."""

    index: int
    """Its place in the workload: the same request has the same index in every run."""
    phase: Phase = "measured"
    worker: int = 0
    scheduled: float
    """When it was due; in a closed loop, when the request before it was answered."""
    started: float
    """When the client began with it; ``started - scheduled`` is the client's own delay."""
    done: float
    """When the stream ended, or the request failed."""
    status: int = 0
    images: int = 1

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
        with self._noting_failure():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1)  # what is added reaches the kernel at once

    def add(self, record: Record) -> None:
        """Append one record; where that fails it is kept in memory, and ``failure`` is set."""
        self.records.append(record)
        if self._file is not None and self.failure is None:
            with self._noting_failure():
                self._file.write(record.model_dump_json() + "\n")

    def close(self) -> None:
        """Close the file; on a full disk, what its buffer still has is lost."""
        if self._file is not None:
            with self._noting_failure():
                self._file.close()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or str(error)


def read_journal(path: Path) -> list[Record]:
    """All records of a file, by index; an incomplete last line is ignored.

    Raises :class:`BenchmarkError` where the file cannot be read or contains anything else.
    """
    fix = "name the folder of a finished run"
    records = read_records(path, _RECORD, BenchmarkError, fix)
    return sorted(records, key=lambda record: record.index)


Read = tuple[float, bytes]
"""When a piece was read from the socket, and the piece."""


@dataclass(frozen=True)
class Client:
    """Sends requests to one server, each on a connection of its own.

    ``clock`` gives seconds since the start of the schedule; ``timeout`` is per read, in seconds.
    """

    url: str
    clock: Callable[[], float] = time.perf_counter
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
        started, status, failure = self.clock(), 0, ""
        reads: list[Read] = []
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close", **self.headers}
        try:
            with contextlib.closing(kind(parts.netloc, timeout=self.timeout)) as connection:
                connection.request("POST", parts.path.rstrip("/") + PATH, body, headers)
                answer = connection.getresponse()
                status = answer.status
                if status != 200:
                    text = answer.read(2000).decode(errors="replace")
                    failure = f"status {status}: {' '.join(text.split())[:200]}"
                # read1 returns what one read of the socket gave, at most one chunk of the transfer.
                while status == 200 and (piece := answer.read1(_READ_SIZE)):
                    reads.append((self.clock(), piece))
        except (OSError, http.client.HTTPException) as error:
            when = "the answer was cut short" if reads else "no answer"
            failure = f"{when}: {type(error).__name__}: {error}"
        done = self.clock()
        content = parse(reads)
        changes = {"text": content.text[:_KEPT_TEXT], "error": failure or content.error}
        return Record(
            index=index,
            phase=phase,
            worker=worker,
            scheduled=started if scheduled is None else scheduled,
            started=started,
            done=done,
            status=status,
            images=images,
            **(content.model_dump() | changes),
        )


def parse(reads: Sequence[Read]) -> Answer:
    """The content of a stream; each event gets the time of the read that completed it.

    A delta counts from its text: the first chunk of a chat, which only names the role, does not.
    """
    deltas: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] = {}
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
        if failure := chunk.get("error"):
            message = failure.get("message", failure) if isinstance(failure, dict) else failure
            error = error or str(message)[:200]
        usage = chunk.get("usage") or usage
        choices = chunk.get("choices") or ()
        content = "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)
        if content:
            deltas.append(arrived)
            text.append(content)
    if not finished:
        error = error or "the answer was cut short: the stream ended without [DONE]"
    return Answer(
        deltas=tuple(deltas),
        text="".join(text),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        error=error or (None if text else EMPTY),
    )


def _events(reads: Sequence[Read]) -> Iterator[tuple[float, str]]:
    """Time and data of each server-sent event; an empty line ends one, which may span reads."""
    pending = b""
    for arrived, piece in reads:
        pending += piece.replace(b"\r\n", b"\n")
        *complete, pending = pending.split(b"\n\n")
        for event in complete:
            lines = event.decode(errors="replace").split("\n")
            data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
            if data:
                yield arrived, "\n".join(data)


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
