"""Pacing under gevent: requests of an open loop by the clock, those of a closed loop by users.

Knows nothing about HTTP: what is done when a request is due is handed to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import gevent
from gevent.event import Event
from gevent.pool import Pool

T = TypeVar("T")
Clock = Callable[[], float]
Send = Callable[[T, float], None]
"""Sends one request that was due at a time; returns when it is answered."""

EARLY = 0.002
"""Seconds that a request is awake before it is due: an event loop sleeps whole milliseconds."""

TICK = 0.01
"""Seconds that an idle greenlet sleeps to find out how late it is woken."""


def open_loop(
    due: Sequence[tuple[T, float]], now: Clock, send: Send[T], stop: Event, most: int
) -> str | None:
    """Send every request when it is due, however slow the answers are; wait for the answers.

    At most ``most`` requests are under way at once: a server that far behind will not recover, and
    the rest of the schedule could only be kept late. Says so; None where all was sent or stopped.
    """
    pool, told = Pool(), None
    for item, at in due:
        if stop.wait(max(at - now() - EARLY, 0.0)):
            break
        while now() < at:
            gevent.sleep(0)  # answers that come in meanwhile are read
        if len(pool) >= most:
            told = f"over-saturated: {most} requests were under way at once"
            stop.set()
            break
        pool.spawn(send, item, at)
    pool.join()
    return told


def closed_loop(items: Iterator[T], now: Clock, send: Send[T], stop: Event) -> None:
    """One user: the next request as soon as the one before it is answered."""
    for item in items:
        if stop.is_set():
            return
        send(item, now())


class Lag:
    """How late a greenlet that only sleeps is woken: the error that any stamp may have."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._greenlet = gevent.spawn(self._sleep)

    def _sleep(self) -> None:
        while True:
            before = time.perf_counter()
            gevent.sleep(TICK)
            self.late.append(max(time.perf_counter() - before - TICK, 0.0))

    def stop(self) -> tuple[float, float]:
        """Median and p99 of the lag, seconds."""
        self._greenlet.kill()
        ordered = sorted(self.late) or [0.0]
        return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
