"""Records on a disk, line by line as they come, so that what was recorded is kept.

Knows nothing about requests.
"""

from __future__ import annotations

from io import TextIOWrapper
from pathlib import Path

from benchmarks.load.record import Record


class Journal:
    """A JSONL file and, in memory, every record whether or not it could be written."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self.failure: str | None = None
        self._file: TextIOWrapper | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        except OSError as error:
            self.failure = str(error)

    def add(self, record: Record) -> None:
        """Keep one more; a full disk costs the file, not the verdict."""
        self.records.append(record)
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            self.failure = str(error)

    def close(self) -> None:
        """Whatever is left in a buffer of a full disk is given up."""
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or str(error)
        self._file = None
