"""The streaming client of all benchmarks, and the record of a request.

Every read of the socket gets a time stamp, and no request is repeated. Under locust ``socket`` is
gevent's, so that a thousand requests wait in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from benchmarks import BenchmarkError
from vllm_autoprune.connection import Connection, make_client, server_address
from vllm_autoprune.http_client import CHAT, describe_rejection
from vllm_autoprune.stream import StreamedAnswer, parse_stream


class Record(StreamedAnswer):
    """Time stamps and outcome of one request, in seconds since the start of the schedule.

    The clock is monotonic.
    """

    index: int = 0
    """Index in the workload; the same request has the same index in every run."""
    measured: bool = True
    """Whether the request counts in the figures."""
    scheduled: float
    """When the request was due; in a closed loop, when the previous request was answered."""
    started: float
    """When the client began to send the request."""
    done: float
    """When the stream ended, or the request failed."""
    status: int = 0

    @property
    def ok(self) -> bool:
        """Whether the request was answered; only then does it have latencies."""
        return self.error is None

    @property
    def delay(self) -> float:
        """Schedule delay: seconds by which the client itself was late."""
        return self.started - self.scheduled

    @property
    def ttft(self) -> float:
        """Time to first token, thoughts included: seconds since the request was due."""
        return self.deltas[0] - self.scheduled

    @property
    def ttfat(self) -> float | None:
        """Time to first token of the answer, after all thoughts; None if there is no answer."""
        answer = self.deltas[self.thoughts :]
        return answer[0] - self.scheduled if answer else None

    @property
    def e2e(self) -> float:
        """End-to-end latency: seconds from when the request was due to its last token."""
        return self.deltas[-1] - self.scheduled

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: seconds between deltas; a delta may hold more than one token."""
        return tuple(b - a for a, b in pairwise(self.deltas))

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, by the server's count; None for one token."""
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.deltas[-1] - self.deltas[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True)
class Client:
    """Sends requests to one server, each on a connection of its own.

    ``clock`` returns seconds since the start of the schedule; ``timeout`` is in seconds, for each
    read. Raises :class:`ConfigError` for an address or a proxy that cannot be used.
    """

    url: str
    clock: Callable[[], float] = time.perf_counter
    timeout: float = 300.0
    connection: Connection = field(default_factory=Connection)

    def __post_init__(self) -> None:
        self._connect().close()

    def _connect(self) -> httpx.Client:
        # A new httpx client takes 0.3 ms; a shared one scans all its connections at every request.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return make_client(
            httpx.Client,
            self.url,
            self.connection,
            headers=headers,
            timeout=self.timeout,
        )

    def send(
        self, body: bytes, *, scheduled: float | None = None, **labels: Any
    ) -> Record:
        """Send one request and return its record; any failure is in the record's ``error``.

        ``labels`` are other fields of the record, such as its index.
        """
        started = self.clock()
        status = 0
        failure = ""
        end = "the stream ended without [DONE]"
        reads: list[tuple[float, bytes]] = []
        url = server_address(self.url) + CHAT
        try:
            with (
                self._connect() as http,
                http.stream("POST", url, content=body) as response,
            ):
                status = response.status_code
                if status != 200:
                    response.read()
                    failure = describe_rejection(response)
                # A piece is the result of one read of the socket, at most one chunk of the
                # transfer.
                for piece in response.iter_bytes() if status == 200 else ():
                    reads.append((self.clock(), piece))
        except httpx.HTTPError as error:
            # A connection that breaks after the complete answer does not matter.
            end = f"{type(error).__name__}: {error}"
            failure = "" if reads else f"no answer: {end}"
        done = self.clock()
        answer = parse_stream(reads, end).model_dump()
        return Record(
            scheduled=started if scheduled is None else scheduled,
            started=started,
            done=done,
            status=status,
            **labels,
            **(answer | {"error": failure or answer["error"]}),
        )

    def send_all(
        self,
        bodies: Sequence[bytes],
        at_once: int = 1,
        *,
        subject: str = "",
        accepted: str = "",
    ) -> list[Record]:
        """Send all requests, ``at_once`` at a time, and return their records in the same order.

        Raises :class:`BenchmarkError`, with ``subject``, if a request has another error than
        ``accepted``.
        """
        pool = ThreadPoolExecutor(at_once)
        records = list[Record]()
        try:
            for future in [pool.submit(self.send, body) for body in bodies]:
                record = future.result()
                if record.error not in (None, accepted):
                    raise BenchmarkError.of(
                        self.url, f"not answered: {record.error}", subject=subject
                    )
                records.append(record)
        finally:
            # Requests that still run fail when the server ends, which must not wait for them.
            pool.shutdown(wait=False, cancel_futures=True)
        return records
