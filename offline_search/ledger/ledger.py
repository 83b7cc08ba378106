"""Ledger: the write-ahead log of a search, and its only persistent state.

Every step is on the disk before the next one uses it, so a killed process loses only requests in
flight: a resumed search runs from its start and takes completed steps from the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from offline_search.ledger.records import (
    EXTERNAL_RECORDS,
    RECORD_ADAPTER,
    Record,
    canonical_json,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.record_file import FileErrors, RecordFile, read_records

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

_READING_ERRORS = replace(_ERRORS, fix_inaccessible="name the ledger of a search that has begun")


class Ledger(RecordFile[Record]):
    """Records of one search by key, in order of writing; one process at a time may write."""

    def __init__(self, path: Path, recording: Iterable[Record] = ()) -> None:
        """Open or create; external records that are missing are copied from a ``recording``.

        A recording is what :func:`read_ledger` returns. An incomplete last line of ``path`` is
        removed. Raises :class:`SearchError` for a file that is not a ledger, is locked, or cannot
        be written.
        """
        super().__init__(path, RECORD_ADAPTER, _ERRORS)
        self._recorded = {
            record.key: record for record in recording if isinstance(record, EXTERNAL_RECORDS)
        }
        self._by_key = {record.key: record for record in self.records}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, kind: type[R], key: str) -> R | None:
        """The record of a key, from this ledger or from the recording that is replayed."""
        record = self._by_key.get(key)
        if record is None and key in self._recorded:
            record = self.put(self._recorded[key])
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
        known = self._by_key.get(record.key)
        if known is not None:
            if not isinstance(known, type(record)) or (
                canonical_json(known) != canonical_json(record)
            ):
                raise SearchError(
                    f"ledger {self.path}: {record.key} does not follow from what is recorded -> "
                    "resume with the version and the data that began it, or begin a new ledger"
                )
            return known
        self.append([record])
        return record

    def append(self, records: Sequence[Record]) -> None:
        """Append records of new keys."""
        super().append(records)
        self._by_key |= {record.key: record for record in records}

    def digest(self) -> str:
        """SHA-256 of all records, independent of their order and clocks."""
        return digest_records(self)


def read_ledger(path: Path) -> list[Record]:
    """The complete records of a ledger, which another process may be writing; changes nothing."""
    return read_records(path, RECORD_ADAPTER, _READING_ERRORS)


def digest_records(records: Iterable[Record]) -> str:
    """SHA-256 of the records of a ledger, independent of their order and clocks."""
    by_key = {record.key: record for record in records}
    lines = sorted(f"{key} {canonical_json(record)}" for key, record in by_key.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
