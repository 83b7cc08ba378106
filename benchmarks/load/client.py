"""One streamed request: sent, stamped at every read of the socket, and put on record.

Knows nothing about schedules. Under locust, ``socket`` is gevent's, so that a thousand of these
wait in one thread; without locust it is the plain one.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.load.record import Phase, Record
from benchmarks.load.stream import Read, parse

PATH = "/v1/chat/completions"
PIECE = 1 << 16
EMPTY = "the answer held no text"
"""Of a load test a failure: it has no first token. To whoever counts right answers, a wrong one."""
KEPT_TEXT = 400
"""Characters of an answer that are kept, to compare servers by what they say."""

Clock = Callable[[], float]


@dataclass
class _Stamps:
    connected: float | None = None
    sent: float | None = None
    headers: float | None = None
    status: int = 0
    reads: list[Read] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """Where to send, and by which clock to stamp; every request has a connection of its own.

    ``clock`` gives seconds since the start of the schedule.
    """

    url: str
    clock: Clock = time.perf_counter
    patience: float = 300.0
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
        stamps, failure = _Stamps(), None
        try:
            failure = self._exchange(body, stamps)
        except (OSError, http.client.HTTPException) as error:
            when = "the answer was cut short" if stamps.reads else "no answer"
            failure = f"{when}: {type(error).__name__}: {error}"
        done = self.clock()
        stream = parse(stamps.reads) if stamps.status == 200 else None
        if stream is not None and failure is None:
            failure = stream.error or _missing(stream.text, stream.finished)
        return Record(
            index=index,
            phase=phase,
            worker=worker,
            scheduled=started if scheduled is None else scheduled,
            started=started,
            connected=stamps.connected,
            sent=stamps.sent,
            headers=stamps.headers,
            deltas=stream.deltas if stream else (),
            done=done,
            status=stamps.status,
            prompt_tokens=stream.prompt_tokens if stream else None,
            completion_tokens=stream.completion_tokens if stream else None,
            cached_tokens=stream.cached_tokens if stream else None,
            images=images,
            body_bytes=len(body),
            text=stream.text[:KEPT_TEXT] if stream else "",
            error=failure,
        )

    def _exchange(self, body: bytes, stamps: _Stamps) -> str | None:
        """Fill in the stamps; a line about what the server refused, or None."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = make(parts.netloc, timeout=self.patience)
        try:
            connection.connect()
            stamps.connected = self.clock()
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request("POST", parts.path.rstrip("/") + PATH, body, headers)
            stamps.sent = self.clock()
            answer = connection.getresponse()
            stamps.headers, stamps.status = self.clock(), answer.status
            if answer.status != 200:
                told = answer.read(2000).decode(errors="replace")
                return f"status {answer.status}: {' '.join(told.split())[:200]}"
            # read1 returns what one read of the socket gave, at most one chunk of the transfer.
            while piece := answer.read1(PIECE):
                stamps.reads.append((self.clock(), piece))
        finally:
            connection.close()
        return None


def _missing(text: str, finished: bool) -> str | None:
    if not finished:
        return "the answer was cut short: the stream ended without [DONE]"
    return None if text else EMPTY
