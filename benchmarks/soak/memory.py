"""Resident memory of every process of a server over time, and whether it stays flat.

Knows nothing about what the server does.

The rule: the time is cut into five equal parts. The first is warm-up. A process is flat where the
median of its resident set in the last part is at most 2 % above the median in the part that follows
the warm-up, or at most 4 MiB where 2 % would be less than that. It has to be there from the end of
the warm-up to the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil  # type: ignore[import-untyped]

PARTS = 5
ALLOWED = 0.02
SLACK = 4 << 20
"""Bytes; a page here and there is 2 % of a process that does nothing."""


@dataclass(frozen=True)
class Flatness:
    """One process, or all together: bytes after the warm-up and at the end."""

    process: str
    early: float
    late: float
    most: int
    flat: bool
    why: str = ""

    @property
    def growth(self) -> float:
        """Share by which it grew."""
        return self.late / self.early - 1.0 if self.early else float("inf")


@dataclass
class Samples:
    """Resident bytes by process, at each of ``seconds`` since the first look."""

    seconds: list[float] = field(default_factory=list)
    resident: list[Mapping[str, int]] = field(default_factory=list)

    def enter(self, at: float, resident: Mapping[str, int]) -> None:
        """Add one look."""
        self.seconds.append(at)
        self.resident.append(dict(resident))

    def judged(self) -> list[Flatness]:
        """Every process that was there after the warm-up, and all together, by the rule above."""
        parts = self._parts()
        if parts is None:
            return [Flatness("all", 0.0, 0.0, 0, False, "too few looks to cut into five")]
        after = [look for part in parts[1:] for look in part]
        names = sorted({name for look in after for name in look})
        found = [_judged(name, parts[1], parts[-1], after) for name in names]
        whole = [[{"all": sum(look.values())} for look in part] for part in parts]
        looks = [look for part in whole for look in part]
        return [*found, _judged("all", whole[1], whole[-1], looks)]

    def _parts(self) -> list[list[Mapping[str, int]]] | None:
        if not self.seconds:
            return None
        span = self.seconds[-1] - self.seconds[0]
        parts: list[list[Mapping[str, int]]] = [[] for _ in range(PARTS)]
        for at, look in zip(self.seconds, self.resident, strict=True):
            share = (at - self.seconds[0]) / span if span else 0.0
            parts[min(int(share * PARTS), PARTS - 1)].append(look)
        return parts if all(parts) else None


def _judged(
    name: str,
    early: Sequence[Mapping[str, int]],
    late: Sequence[Mapping[str, int]],
    looks: Sequence[Mapping[str, int]],
) -> Flatness:
    held = [look[name] for look in looks if name in look]
    if any(name not in look for look in looks):
        return Flatness(name, 0.0, 0.0, max(held), False, "it was not there all the time")
    begun = median(look[name] for look in early)
    ended = median(look[name] for look in late)
    flat = ended - begun <= max(ALLOWED * begun, SLACK)
    return Flatness(name, begun, ended, max(held), flat, "" if flat else "it grew")


def resident(pid: int) -> dict[str, int]:
    """Resident bytes of a process and of all below it, by number and title."""
    root = psutil.Process(pid)
    found: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            held = int(process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if held:
            found[f"{process.pid} {_short(title)}"] = held
    return found


def _short(title: str) -> str:
    """``VLLM::EngineCore``, or the last words of a command's first ones: names without folders."""
    first, *rest = title.split() or ["?"]
    if first.startswith("VLLM::"):
        return first
    words = [word.rsplit("/", 1)[-1] for word in (first, *rest) if not word.startswith("-")]
    return " ".join(words[:3])


@contextmanager
def watched(pid: int, every: float) -> Iterator[Samples]:
    """Look at a server's processes every so many seconds until the block ends."""
    samples, over, begun = Samples(), threading.Event(), time.monotonic()

    def look() -> None:
        while True:
            try:
                samples.enter(time.monotonic() - begun, resident(pid))
            except psutil.NoSuchProcess:
                return  # requests fail from now on, which says it better
            if over.wait(every):
                return

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
