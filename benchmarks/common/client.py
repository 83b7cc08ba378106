"""The streaming client of all benchmarks, and the record of a request.

Every read of the socket is stamped, no request is repeated. Under locust ``socket`` is gevent's,
so that a thousand requests wait in one thread.
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
    """Its place in the workload: the same request has the same index in every run."""
    measured: bool = True
    """Whether it counts."""
    scheduled: float
    """When it was due; in a closed loop, when the request before it was answered."""
    started: float
    """When the client began with it."""
    done: float
    """When the stream ended, or the request failed."""
    status: int = 0

    @property
    def ok(self) -> bool:
        """Whether the request was answered; only then it has latencies."""
        return self.error is None

    @property
    def delay(self) -> float:
        """Schedule delay: seconds by which the client itself was late."""
        return self.started - self.scheduled

    @property
    def ttft(self) -> float:
        """Time to first token, of thoughts or not: seconds since the request was due."""
        return self.deltas[0] - self.scheduled

    @property
    def ttfat(self) -> float | None:
        """Time to first answer token, behind all thoughts; None where there is no answer."""
        answer = self.deltas[self.thoughts :]
        return answer[0] - self.scheduled if answer else None

    @property
    def e2e(self) -> float:
        """End-to-end latency: seconds from the moment the request was due to its last token."""
        return self.deltas[-1] - self.scheduled

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: seconds between deltas, which may hold more than one token."""
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

    ``clock`` gives seconds since the start of the schedule; ``timeout`` is per read, in seconds.
    Raises :class:`ConfigError` for an address or a proxy that cannot be used.
    """

    url: str
    clock: Callable[[], float] = time.perf_counter
    timeout: float = 300.0
    connection: Connection = field(default_factory=Connection)

    def __post_init__(self) -> None:
        self._connect().close()

    def _connect(self) -> httpx.Client:
        # One for each request takes 0.3 ms; of a shared one httpx scans all connections each time.
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
        """The record of one request; whatever goes wrong is in its ``error``.

        ``labels``: other fields of the record, such as its index.
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
                # A piece is what one read of the socket gave, at most one chunk of the transfer.
                for piece in response.iter_bytes() if status == 200 else ():
                    reads.append((self.clock(), piece))
        except httpx.HTTPError as error:
            # A connection that breaks behind the whole answer does not matter.
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
        """The records of all requests in their order; ``at_once`` are in flight.

        Raises :class:`BenchmarkError` of ``subject`` where one has another error than ``accepted``.
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
            # Those still running fail when the server ends, which must not wait for them.
            pool.shutdown(wait=False, cancel_futures=True)
        return records
