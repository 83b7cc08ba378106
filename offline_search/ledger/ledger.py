"""Ledger: the write-ahead log of a search, and its only persistent state.

Every step is on the disk before the next one uses it, so a killed process loses only requests in
flight: a resumed search runs from its start and takes completed steps from the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from offline_search.ledger.record_file import FileErrors, RecordFile, read_records
from offline_search.ledger.records import (
    EXTERNAL_RECORDS,
    RECORD_ADAPTER,
    Record,
    canonical_json,
)
from vllm_autoprune.errors import SearchError

R = TypeVar("R", bound=Record)

_ERRORS = FileErrors(
    error_type=SearchError,
    file_label="ledger",
    writer="another search",
    fix_locked="wait for it, or begin another ledger",
    fix_disk_full="make room and resume: everything up to here is kept",
    fix_inaccessible="choose a file that can be written",
    fix_invalid_line="give another file, or the version that wrote it",
)


class Ledger:
    """Records of one search by key, in order of writing; one process at a time may write."""

    def __init__(self, path: Path, recording: Ledger | None = None) -> None:
        """Open or create; external records that are missing are copied from a ``recording``.

        An incomplete last line is removed. Raises :class:`SearchError` for a file that is not a
        ledger, is locked, or cannot be written.
        """
        self.path = path
        self._recording = recording
        self._file = RecordFile(path, RECORD_ADAPTER, _ERRORS)
        self._records = {record.key: record for record in self._file.records}

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        """Release the lock and close the file."""
        self._file.close()

    def find(self, kind: type[R], key: str) -> R | None:
        """The record of a key, from this ledger or from the recording that is replayed."""
        record = self._records.get(key)
        if record is None and self._recording is not None and issubclass(kind, EXTERNAL_RECORDS):
            record = self._recording.find(kind, key)
            if record is not None:
                self.put(record)
        if record is None:
            return None
        if not isinstance(record, kind):
            raise SearchError(
                f"ledger {self.path}: {key} is a {record.kind}, not a {kind.__name__}"
            )
        return record

    def put(self, record: R) -> R:
        """Append a record and return it; for a known key, return the existing equal record.

        Raises :class:`SearchError` if the existing record differs, which means a ledger of another
        search or version, or if the record cannot be written.
        """
        known = self._records.get(record.key)
        if known is not None:
            if not isinstance(known, type(record)) or (
                canonical_json(known) != canonical_json(record)
            ):
                raise SearchError(
                    f"ledger {self.path}: {record.key} does not follow from what is recorded -> "
                    "resume with the version and the data that began it, or begin a new ledger"
                )
            return known
        self._file.append([record])
        self._records[record.key] = record
        return record

    def digest(self) -> str:
        """SHA-256 of all records, independent of their order and clocks."""
        lines = sorted(f"{key} {canonical_json(record)}" for key, record in self._records.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_ledger(path: Path) -> list[Record]:
    """The complete records of a ledger, which another process may be writing."""
    return read_records(path, RECORD_ADAPTER, _ERRORS)
