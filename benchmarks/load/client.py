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
from typing import TYPE_CHECKING, TypeVar

import gevent
from gevent.event import Event
from gevent.pool import Pool

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client, Phase
from benchmarks.load.result import ClientFacts
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import Prepared, load_prepared

if TYPE_CHECKING:  # importing locust patches the sockets of the process
    from locust.env import Environment
    from locust.rpc import Message

T = TypeVar("T")

READY, START, RECORD, DONE = "load-ready", "load-start", "load-record", "load-done"
"""Messages: a worker has warmed up the server (digest of its bodies, or a problem); when to start
and which share to send; one record; all facts of a client that has sent its share."""
_MAX_FAILURES = 10
"""Consecutive failures after which the run is given up."""
_EARLY = 0.002
"""Seconds of busy waiting before a request is due: an event loop sleeps whole milliseconds."""
_TICK = 0.01
"""Seconds that the greenlet of :class:`_Lag` sleeps each time."""
_WARM_UP_AT_ONCE = 4


def raise_priority() -> None:
    """Raise the scheduling priority of this process, so that the server does not delay its clock.

    Used as ``preexec_fn``. With real-time scheduling (``sched(7)``) the client gets a core as soon
    as it is due; it sleeps most of the time, and the kernel reserves a twentieth of each second for
    other processes. Only root on Linux may; else nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def describe_priority() -> str:
    """``real time``, or the nice value of this process."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        return "real time"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def read_api_key() -> dict[str, str]:
    """The header of ``OPENAI_API_KEY``, where it is set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_loop(
    due: Sequence[tuple[T, float]],
    now: Callable[[], float],
    send: Callable[[T, float], None],
    stop: Event,
    most: int,
) -> str | None:
    """Send every request when it is due, without waiting for answers; at the end wait for all.

    ``send`` gets the time at which a request was due, and returns when it is answered. Ends where
    ``most`` requests are in flight: a server that far behind does not recover. Returns that reason;
    None where everything was sent, or sending was stopped.
    """
    pool, problem = Pool(), None
    for item, at in due:
        if stop.wait(max(at - now() - _EARLY, 0.0)):
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
            gevent.sleep(_TICK)
            self._late.append(max(time.perf_counter() - before - _TICK, 0.0))

    def stop(self) -> tuple[float, float]:
        """End the measurement; return median and p99 of the lag, in seconds."""
        self._greenlet.kill()
        ordered = sorted(self._late) or [0.0]
        return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


class Sender:
    """Warms up the server, waits for the start message, sends, and reports when it is done."""

    def __init__(self, environment: Environment) -> None:
        assert environment.runner is not None
        self._environment, self._runner = environment, environment.runner
        self._start, self._stop = Event(), Event()
        self._share: list[tuple[tuple[int, Phase], float]] = []
        self._queue: Iterator[tuple[int, Phase]] = iter(())
        self._unsent = self._consecutive_failures = self._worker = 0
        self._zero = self._cpu = 0.0
        self._broken: str | None = None
        self._lag: _Lag | None = None
        self._options: RunOptions
        self._prepared: Prepared
        self._client: Client
        self._runner.register_message(START, self._on_start)
        environment.events.test_stopping.add_listener(self._on_stopping)

    def begin(self, options: RunOptions) -> None:
        """Read the bodies, warm up the server, and report to the coordinator."""
        self._options = options
        self._client = Client(options.url, self._now, options.patience, read_api_key())
        try:
            self._prepared = load_prepared(options.workload)
        except BenchmarkError as error:
            self._runner.send_message(READY, {"problem": str(error)})
            return
        gevent.spawn(self._warm_up)

    def work(self) -> None:
        """The task of every locust user: send its part of the share."""
        self._start.wait()
        if not self._share:
            return
        if self._options.load.rate is None:
            for item in self._queue:  # which all users share
                if self._stop.is_set():
                    return
                self._send(item, self._now())
            return
        share, self._share = self._share, []  # the first user of a worker sends all
        problem = open_loop(share, self._now, self._send, self._stop, self._options.most)
        self._broken = self._broken or problem
        self._finish_if_over()

    def _warm_up(self) -> None:
        pool = Pool(_WARM_UP_AT_ONCE)
        for body in self._prepared.warm_up:
            pool.spawn(self._client.send, body)
        pool.join()
        # Garbage collection of what exists by now would delay time stamps.
        gc.collect()
        gc.freeze()
        self._runner.send_message(READY, {"digest": self._prepared.digest})

    def _on_start(self, environment: Environment, msg: Message, **_: object) -> None:
        """Take every ``of``-th request from ``index`` on; ``at`` is the Unix time of the start."""
        at, index, of = float(msg.data["at"]), int(msg.data["index"]), int(msg.data["of"])
        load, count = self._options.load, len(self._prepared.measured)
        schedule = [*zip(enumerate(load.phases(count)), load.due(count), strict=True)]
        self._share = schedule[index::of]
        self._queue = iter([item for item, _ in self._share])
        self._unsent, self._worker = len(self._share), index
        # From here on each worker goes by its own monotonic clock.
        self._zero = time.perf_counter() + (at - time.time())
        self._lag, self._cpu = _Lag(), time.process_time()
        # Users of a closed loop begin as soon as this event is set.
        gevent.spawn_later(max(at - time.time(), 0.0), self._start.set)
        if not self._share:
            self._finish_if_over()

    def _on_stopping(self, **_: object) -> None:
        """Send no further request."""
        self._stop.set()
        self._start.set()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _send(self, item: tuple[int, Phase], at: float) -> None:
        index, phase = item
        record = self._client.send(
            self._prepared.measured[index],
            index=index,
            scheduled=at,
            phase=phase,
            worker=self._worker,
            images=self._prepared.images[index],
        )
        self._runner.send_message(RECORD, record.model_dump(mode="json"))
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
        if self._consecutive_failures >= _MAX_FAILURES and self._broken is None:
            self._broken = (
                f"{_MAX_FAILURES} requests in a row failed, the last with: {record.error}"
            )
            self._stop.set()
        self._unsent -= 1
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """Report once that all is sent, or that sending was stopped."""
        if self._lag is None or (self._unsent > 0 and not self._stop.is_set()):
            return
        cpu = (time.process_time() - self._cpu) / max(self._now(), 1e-9)
        (median, p99), self._lag = self._lag.stop(), None
        facts = ClientFacts(
            worker=self._worker, cpu=cpu, lag_p50=median, lag_p99=p99, broken=self._broken
        )
        self._runner.send_message(DONE, facts.model_dump(mode="json"))
