"""Resident memory of every process of a server over time, without files, and whether it grows.

The time is divided into five equal parts; the first is the warm-up. A process is flat if the median
of its resident memory in the last part exceeds that of the second part by at most 2 %, or by
at most 4 MiB where that is more. It must exist from the end of the warm-up to the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil  # type: ignore[import-untyped]

from benchmarks.server import resident_by_process

PARTS = 5
ALLOWED = 0.02
SLACK = 4 << 20
"""Bytes of growth that are always tolerated."""


@dataclass(frozen=True)
class Flatness:
    """Bytes of one process, or of all, after the warm-up and at the end."""

    process: str
    early: float
    late: float
    most: int
    flat: bool
    why: str = ""

    @property
    def growth(self) -> float:
        """Relative growth."""
        return self.late / self.early - 1.0 if self.early else float("inf")


@dataclass
class Samples:
    """Resident bytes by process at each of ``seconds``."""

    seconds: list[float] = field(default_factory=list)
    resident: list[Mapping[str, int]] = field(default_factory=list)

    def add(self, at: float, resident: Mapping[str, int]) -> None:
        """Add one sample."""
        self.seconds.append(at)
        self.resident.append(dict(resident))

    def judge(self) -> list[Flatness]:
        """The verdict on every process that existed after the warm-up, and on all together."""
        parts = self._parts()
        if parts is None:
            return [Flatness("all", 0.0, 0.0, 0, False, "too few samples")]
        later = [sample for part in parts[1:] for sample in part]
        names = sorted({name for sample in later for name in sample})
        verdicts = [_judge(name, parts[1], parts[-1], later) for name in names]
        whole = [[{"all": sum(sample.values())} for sample in part] for part in parts]
        totals = [sample for part in whole for sample in part]
        return [*verdicts, _judge("all", whole[1], whole[-1], totals)]

    def _parts(self) -> list[list[Mapping[str, int]]] | None:
        if not self.seconds:
            return None
        span = self.seconds[-1] - self.seconds[0]
        parts: list[list[Mapping[str, int]]] = [[] for _ in range(PARTS)]
        for at, sample in zip(self.seconds, self.resident, strict=True):
            share = (at - self.seconds[0]) / span if span else 0.0
            parts[min(int(share * PARTS), PARTS - 1)].append(sample)
        return parts if all(parts) else None


def _judge(
    name: str,
    early: Sequence[Mapping[str, int]],
    late: Sequence[Mapping[str, int]],
    samples: Sequence[Mapping[str, int]],
) -> Flatness:
    sizes = [sample[name] for sample in samples if name in sample]
    if any(name not in sample for sample in samples):
        return Flatness(name, 0.0, 0.0, max(sizes), False, "it did not exist all the time")
    before = median(sample[name] for sample in early)
    after = median(sample[name] for sample in late)
    flat = after - before <= max(ALLOWED * before, SLACK)
    return Flatness(name, before, after, max(sizes), flat, "" if flat else "it grew")


@contextmanager
def watch_memory(pid: int, every: float) -> Iterator[Samples]:
    """Sample the memory of a server's processes every so many seconds until the block ends."""
    samples, stop, begin = Samples(), threading.Event(), time.monotonic()

    def poll() -> None:
        while True:
            try:
                samples.add(time.monotonic() - begin, resident_by_process(pid, files=False))
            except psutil.NoSuchProcess:
                return  # the server ended: requests fail from now on
            if stop.wait(every):
                return

    thread = threading.Thread(target=poll, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
