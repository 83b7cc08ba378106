"""The sending side of a load test: each locust worker paces and sends its share of the requests.

An open loop sends by the clock, a closed loop after each answer.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust.env import Environment
from locust.rpc import Message
from locust.runners import Runner

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.request_record import Phase, Record
from benchmarks.load.messages import DONE, READY, RECORD, START, Done, Ready, Start
from benchmarks.load.result import ClientFacts
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import Line, Prepared, load_prepared

T = TypeVar("T")
Clock = Callable[[], float]
Send = Callable[[T, float], None]
"""Sends one request, which was due at the given time; returns when it is answered."""

EARLY = 0.002
"""Seconds of busy waiting before a request is due: an event loop sleeps whole milliseconds."""

TICK = 0.01
"""Seconds that the greenlet of :class:`Lag` sleeps each time."""


def open_loop(
    due: Sequence[tuple[T, float]], now: Clock, send: Send[T], stop: Event, most: int
) -> str | None:
    """Send every request when it is due, however slow the answers are; wait for the answers.

    Ends where ``most`` requests are in flight: a server that far behind does not recover. Returns
    that reason; None where everything was sent, or sending was stopped.
    """
    pool, problem = Pool(), None
    for item, at in due:
        if stop.wait(max(at - now() - EARLY, 0.0)):
            break
        while now() < at:
            gevent.sleep(0)  # let answers be read meanwhile
        if len(pool) >= most:
            problem = f"over-saturated: {most} requests were in flight at once"
            stop.set()
            break
        pool.spawn(send, item, at)
    pool.join()
    return problem


def closed_loop(items: Iterator[T], now: Clock, send: Send[T], stop: Event) -> None:
    """One user: the next request as soon as the one before it is answered."""
    for item in items:
        if stop.is_set():
            return
        send(item, now())


class Lag:
    """Measures how late an idle greenlet is woken, which bounds the error of each timestamp."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._greenlet = gevent.spawn(self._sleep)

    def _sleep(self) -> None:
        while True:
            before = time.perf_counter()
            gevent.sleep(TICK)
            self.late.append(max(time.perf_counter() - before - TICK, 0.0))

    def stop(self) -> tuple[float, float]:
        """End the measurement; return median and p99 of the lag, in seconds."""
        self._greenlet.kill()
        ordered = sorted(self.late) or [0.0]
        return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


WARM_UP_AT_ONCE = 4
MAX_FAILURES = 10
"""Consecutive failures after which the run is given up."""

Item = tuple[Line, Phase]


class Sender:
    """Warms up the server, waits for the start message, sends, and reports when it is done."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._start, self._stop = Event(), Event()
        self._share: list[tuple[Item, float]] = []
        self._queue: Iterator[Item] = iter(())
        self._left = self._consecutive_failures = self._index = 0
        self._zero = self._cpu = 0.0
        self._broken: str | None = None
        self._lag: Lag | None = None
        self._options: RunOptions | None = None
        self._prepared: Prepared | None = None
        runner.register_message(START, self._on_start)

    def begin(self, options: RunOptions) -> None:
        """Read the bodies, warm up the server, and report to the coordinator."""
        self._options = options
        try:
            self._prepared = load_prepared(options.workload)
        except BenchmarkError as error:
            self._send_message(READY, Ready(digest="", problem=str(error)))
            return
        gevent.spawn(self._warm_up, self._prepared)

    def work(self) -> None:
        """The task of every locust user: send its part of the share."""
        self._start.wait()
        if self._options is None:
            return
        if self._options.load.rate is None:
            closed_loop(self._queue, self._now, self._send, self._stop)
            return
        share, self._share = self._share, []  # the first user of a worker sends all
        if share:
            problem = open_loop(share, self._now, self._send, self._stop, self._options.most)
            self._broken = self._broken or problem
            self._finish_if_over()

    def stop(self) -> None:
        """Send no further request."""
        self._stop.set()
        self._start.set()

    def _warm_up(self, prepared: Prepared) -> None:
        pool = Pool(WARM_UP_AT_ONCE)
        client = self._client()
        for line in prepared.warm_up:
            pool.spawn(client.send, prepared.body(line), index=line.ask.index)
        pool.join()
        # Garbage collection of what exists by now would delay time stamps.
        gc.collect()
        gc.freeze()
        self._send_message(READY, Ready(digest=prepared.digest))

    def _on_start(self, environment: Environment, msg: Message, **_: object) -> None:
        message = Start.model_validate(msg.data)
        prepared, options = self._prepared, self._options
        assert prepared is not None and options is not None
        lines = prepared.measured[: options.first or None]
        phases, due = options.load.phases(len(lines)), options.load.due(len(lines))
        schedule = [((line, phase), at) for line, phase, at in zip(lines, phases, due, strict=True)]
        self._share = schedule[message.index :: message.of]
        self._queue = iter([item for item, _ in self._share])
        self._left, self._index = len(self._share), message.index
        self._zero = time.perf_counter() + (message.at - time.time())
        self._lag, self._cpu = Lag(), time.process_time()
        # Users of a closed loop begin as soon as this event is set.
        gevent.spawn_later(max(message.at - time.time(), 0.0), self._start.set)
        if not self._share:
            self._finish_if_over()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _client(self) -> Client:
        assert self._options is not None
        key = os.environ.get("OPENAI_API_KEY")
        headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"} if key else {}
        return Client(self._options.url, self._now, self._options.patience, headers)

    def _send(self, item: Item, at: float) -> None:
        line, phase = item
        assert self._prepared is not None
        record = self._client().send(
            self._prepared.body(line),
            index=line.ask.index,
            scheduled=at,
            phase=phase,
            worker=self._index,
            images=len(line.ask.pictures),
        )
        self._send_message(RECORD, record)
        self._report_to_locust(record)
        self._consecutive_failures = 0 if record.ok else self._consecutive_failures + 1
        if self._consecutive_failures >= MAX_FAILURES and self._broken is None:
            self._broken = f"{MAX_FAILURES} requests in a row failed, the last with: {record.error}"
            self._stop.set()
        self._left -= 1
        self._finish_if_over()

    def _report_to_locust(self, record: Record) -> None:
        """Report to locust, for its own statistics and pages."""
        self._environment.events.request.fire(
            request_type="chat",
            name=record.phase,
            response_time=1000 * (record.e2e if record.ok else record.done - record.scheduled),
            response_length=len(record.text),
            exception=None if record.ok else RuntimeError(record.error),
            context={},
        )

    def _finish_if_over(self) -> None:
        """Report once that nothing is left, or that sending was stopped."""
        if self._lag is None or (self._left > 0 and not self._stop.is_set()):
            return
        seconds = max(self._now(), 1e-9)
        cpu = (time.process_time() - self._cpu) / seconds
        (median, p99), self._lag = self._lag.stop(), None
        facts = ClientFacts(
            worker=self._index, cpu=cpu, lag_p50=median, lag_p99=p99, broken=self._broken
        )
        self._send_message(DONE, Done(facts=facts))

    def _send_message(self, kind: str, content: Ready | Record | Done) -> None:
        self._runner.send_message(kind, content.model_dump(mode="json"))
