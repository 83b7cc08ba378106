"""Load client: each locust worker paces and sends its share of the requests, and never retries.

An open loop sends by the clock, however slow the answers are; a closed loop after each answer.
Workers and coordinator exchange messages as JSON; without workers, one locust runner sends them to
itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import gevent
from gevent.event import Event
from gevent.pool import Pool

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import Client, Phase
from benchmarks.load.result import ClientFacts
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import Line, Prepared, load_prepared

if TYPE_CHECKING:  # importing locust patches the sockets of the process
    from locust.env import Environment
    from locust.rpc import Message
    from locust.runners import Runner

T = TypeVar("T")
Clock = Callable[[], float]
Send = Callable[[T, float], None]
"""Sends one request, which was due at the given time; returns when it is answered."""

READY, START, RECORD, DONE = "load-ready", "load-start", "load-record", "load-done"
EARLY = 0.002
"""Seconds of busy waiting before a request is due: an event loop sleeps whole milliseconds."""
TICK = 0.01
"""Seconds that the greenlet of :class:`_Lag` sleeps each time."""
WARM_UP_AT_ONCE = 4
MAX_FAILURES = 10
"""Consecutive failures after which the run is given up."""
NICE = -10
"""About nine times the CPU weight of a process of default priority."""
_SESSION = Path("/proc/self/autogroup")


class Ready(StrictModel):
    """A worker has warmed up the server and waits for the start."""

    digest: str
    """Of its request bodies, which must be those of the coordinator."""
    problem: str | None = None


class Start(StrictModel):
    """To one worker: when to start, and which share of the requests to send."""

    at: float
    """Unix time, which each worker converts to its own monotonic clock once."""
    index: int
    of: int
    """It sends the requests ``index``, ``index + of``, ``index + 2 of``, ..."""


def raise_priority() -> None:
    """Raise the scheduling priority of this process, so that the server does not delay its clock.

    Used as ``preexec_fn`` of a process in a session of its own. With real-time scheduling
    (``sched(7)``) the client gets a core as soon as it is due; it sleeps most of the time, and the
    kernel reserves a twentieth of each second for other processes. Where that is refused, the nice
    values of the process and its session are lowered. Both need root; else nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if _SESSION.exists():
        with contextlib.suppress(OSError):
            _SESSION.write_text(str(NICE))


def describe_priority() -> str:
    """``real time``, or the nice values of this process and, if known, of its session."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        return "real time"
    nice = f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
    try:
        group = _SESSION.read_text().split()
    except OSError:
        return nice
    return f"{nice}, session {group[-1]}" if group else nice


def open_loop(
    due: Sequence[tuple[T, float]], now: Clock, send: Send[T], stop: Event, most: int
) -> str | None:
    """Send every request when it is due, without waiting for answers; at the end wait for all.

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


class _Lag:
    """Wake-up lag of an idle greenlet, which bounds the error of each time stamp."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._greenlet = gevent.spawn(self._sleep)

    def _sleep(self) -> None:
        while True:
            before = time.perf_counter()
            gevent.sleep(TICK)
            self._late.append(max(time.perf_counter() - before - TICK, 0.0))

    def stop(self) -> tuple[float, float]:
        """End the measurement; return median and p99 of the lag, in seconds."""
        self._greenlet.kill()
        ordered = sorted(self._late) or [0.0]
        return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


class Sender:
    """Warms up the server, waits for the start message, sends, and reports when it is done."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._start, self._stop = Event(), Event()
        self._share: list[tuple[tuple[Line, Phase], float]] = []
        self._queue: Iterator[tuple[Line, Phase]] = iter(())
        self._unsent = self._consecutive_failures = self._index = 0
        self._zero = self._cpu = 0.0
        self._broken: str | None = None
        self._lag: _Lag | None = None
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
            for item in self._queue:  # which all users share
                if self._stop.is_set():
                    return
                self._send(item, self._now())
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
        pool, client = Pool(WARM_UP_AT_ONCE), self._client()
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
        self._unsent, self._index = len(self._share), message.index
        self._zero = time.perf_counter() + (message.at - time.time())
        self._lag, self._cpu = _Lag(), time.process_time()
        # Users of a closed loop begin as soon as this event is set.
        gevent.spawn_later(max(message.at - time.time(), 0.0), self._start.set)
        if not self._share:
            self._finish_if_over()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _client(self) -> Client:
        assert self._options is not None
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return Client(self._options.url, self._now, self._options.patience, headers)

    def _send(self, item: tuple[Line, Phase], at: float) -> None:
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
        # For locust's own statistics and pages.
        self._environment.events.request.fire(
            request_type="chat",
            name=record.phase,
            response_time=1000 * (record.e2e if record.ok else record.done - record.scheduled),
            response_length=len(record.text),
            exception=None if record.ok else RuntimeError(record.error),
            context={},
        )
        self._consecutive_failures = 0 if record.ok else self._consecutive_failures + 1
        if self._consecutive_failures >= MAX_FAILURES and self._broken is None:
            self._broken = f"{MAX_FAILURES} requests in a row failed, the last with: {record.error}"
            self._stop.set()
        self._unsent -= 1
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """Report once that nothing is left, or that sending was stopped."""
        if self._lag is None or (self._unsent > 0 and not self._stop.is_set()):
            return
        cpu = (time.process_time() - self._cpu) / max(self._now(), 1e-9)
        (median, p99), self._lag = self._lag.stop(), None
        facts = ClientFacts(
            worker=self._index, cpu=cpu, lag_p50=median, lag_p99=p99, broken=self._broken
        )
        self._send_message(DONE, facts)

    def _send_message(self, kind: str, content: StrictModel) -> None:
        self._runner.send_message(kind, content.model_dump(mode="json"))
