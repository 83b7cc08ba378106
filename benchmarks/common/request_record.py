"""The record of one request, all its times and what was answered; and the journal of records."""

from __future__ import annotations

from collections.abc import Iterable
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from benchmarks.common import BenchmarkError, StrictModel
from vllm_autoprune.record_file import FileErrors, read_records

Phase = Literal["warm-up", "ramp", "measured", "drain"]


class Record(StrictModel):
    """One request. Times are seconds of a monotonic clock since the start of the schedule."""

    index: int
    """Its place in the workload: the same request has the same index in every run."""
    phase: Phase = "measured"
    worker: int = 0
    scheduled: float
    """When it was due; in a closed loop, when the request before it was answered."""
    started: float
    """When the client began with it; ``started - scheduled`` is the client's own delay."""
    connected: float | None = None
    sent: float | None = None
    """When the last byte of the body was handed to the kernel."""
    headers: float | None = None
    deltas: tuple[float, ...] = ()
    """Arrival of each delta with text; the first of them ends the time to first token."""
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
    """What went wrong, in a line; None where the request was answered."""

    @property
    def ok(self) -> bool:
        """Whether the request was answered with text; only then it has latencies."""
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


_RECORD = TypeAdapter(Record)
_ERRORS = FileErrors(
    error_type=BenchmarkError,
    file_label="records",
    writer="a load test",
    fix_locked="wait for it",
    fix_disk_full="make room and measure again",
    fix_inaccessible="name the folder of a finished run",
    fix_invalid_line="measure again, or use the version that wrote it",
)


class Journal:
    """A JSONL file of records, and all of them in memory, whether or not they could be written.

    Unlike ``RecordFile`` it does not wait for the disk: that would delay the time stamps of a load
    client in the same process.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self.failure: str | None = None
        """Why the file is not complete."""
        self._file: TextIOWrapper | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        except OSError as error:
            self.failure = str(error)

    def add(self, record: Record) -> None:
        """Append one record; where that fails it is kept in memory, and ``failure`` is set."""
        self.records.append(record)
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            self.failure = str(error)

    def close(self) -> None:
        """Close the file; on a full disk, what is left in its buffer is lost."""
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or str(error)
        self._file = None


def read_journal(path: Path) -> list[Record]:
    """All records of a file, by index; an incomplete last line is ignored.

    Raises :class:`BenchmarkError` where the file cannot be read or contains anything else.
    """
    return sorted(read_records(path, _RECORD, _ERRORS), key=lambda record: record.index)


def answered(records: Iterable[Record]) -> list[Record]:
    """The records of requests that were answered."""
    return [record for record in records if record.ok]
