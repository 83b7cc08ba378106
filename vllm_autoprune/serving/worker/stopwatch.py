"""Timer of device work that does not wait for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Timer of blocks of work on one device; finished ones are collected later.

    On CUDA the work is enclosed in two events, without waiting for them: unfinished blocks are
    collected next time. On a CPU the work is finished when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished: list[float] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time a block; a block that raises is not timed."""
        if not self._cuda:
            start_time = time.perf_counter()
            yield
            self._finished.append(time.perf_counter() - start_time)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._running.append((start, end))

    def collect(self) -> list[float]:
        """Seconds of every finished block that has not been collected yet, in order."""
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            self._finished.append(start.elapsed_time(end) / 1000)
        finished, self._finished = self._finished, []
        return finished
