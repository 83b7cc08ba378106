"""The record of one request: every stamp that was taken, and what the answer said.

Knows nothing about how stamps are taken or summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from benchmarks.load.plain import Plain

Phase = Literal["warm-up", "ramp", "measured", "drain"]


class Record(Plain):
    """One request. Times are seconds of a monotonic clock since the start of the schedule."""

    index: int
    """Its place in the workload: the same request has the same index in every run."""
    phase: Phase = "measured"
    worker: int = 0
    scheduled: float
    """When it was due; in a closed loop, when the user before it was done."""
    started: float
    """When the client turned to it; ``started - scheduled`` is the client's own delay."""
    connected: float | None = None
    sent: float | None = None
    """When the last byte of the body was handed to the kernel."""
    headers: float | None = None
    deltas: tuple[float, ...] = ()
    """Arrival of each delta that held text; the first of them ends the time to first token."""
    done: float
    """When the stream ended, or the request failed."""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    images: int = 1
    body_bytes: int = 0
    text: str = ""
    error: str | None = None
    """What went wrong, in a line; None where the request was answered as it should be."""

    @property
    def ok(self) -> bool:
        """Answered, with text; only such requests have latencies."""
        return self.error is None

    @property
    def delay(self) -> float:
        """Seconds by which the client itself was late."""
        return self.started - self.scheduled

    @property
    def ttft(self) -> float:
        """Seconds from the moment the request was due to its first text."""
        return self.deltas[0] - self.scheduled

    @property
    def e2e(self) -> float:
        """Seconds from the moment the request was due to its last text."""
        return self.deltas[-1] - self.scheduled

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between deltas; a delta may hold more than one token."""
        return tuple(b - a for a, b in pairwise(self.deltas))

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, by the server's count of tokens; None for one token."""
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.deltas[-1] - self.deltas[0]) / (self.completion_tokens - 1)


def read(path: Path) -> list[Record]:
    """All records of a file, by index; a last line that was cut off is left out."""
    return sorted(_read(path), key=lambda record: record.index)


def _read(path: Path) -> Iterator[Record]:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield Record.model_validate_json(line)
        except ValidationError:
            if number < len(lines):
                raise


def answered(records: Iterable[Record]) -> list[Record]:
    """Those that were answered as they should be."""
    return [record for record in records if record.ok]
