"""Timer of work on a device that does not wait for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times pieces of work on one device; those that are over are collected later.

    On CUDA two events stand around the work, and nobody waits for them: what is not over yet is
    collected next time. On a CPU the work is over when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._over: list[float] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time a block; a block that raises is not timed."""
        if not self._cuda:
            begun = time.perf_counter()
            yield
            self._over.append(time.perf_counter() - begun)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._running.append((start, end))

    def collect(self) -> list[float]:
        """Seconds of every block that is over and has not been collected, in order."""
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            self._over.append(start.elapsed_time(end) / 1000)
        over, self._over = self._over, []
        return over
