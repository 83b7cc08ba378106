"""Pacing under gevent: an open loop sends by the clock, a closed loop after each answer."""

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
    """Measures how late an idle greenlet is woken: the error of every time stamp."""

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
