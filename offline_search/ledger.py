"""The ledger: an append-only JSONL file, the only thing a search remembers.

Knows nothing about what a search does. A record is on the disk before anything follows from it,
so a process that is killed loses what was in flight and no more: the search runs again from its
start, and finds in the ledger whatever it has already done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from offline_search import appended
from offline_search.appended import Appended, Wording
from offline_search.records import EFFECTS, RECORD, Record, content
from vllm_autoprune.errors import SearchError

R = TypeVar("R", bound=Record)

_WORDING = Wording(
    error=SearchError,
    noun="ledger",
    writer="another search",
    wait="wait for it, or begin another ledger",
    room="make room and resume: everything up to here is kept",
    place="choose a file that can be written",
    other="give another file, or the version that wrote it",
)


class Ledger:
    """Records by key, in the order they came. One process at a time writes to a file."""

    def __init__(self, path: Path, recording: Ledger | None = None) -> None:
        """Open or create; effects that are not in the file are taken from a ``recording``.

        A last line that a kill cut off is removed. Raises :class:`SearchError` for a file that is
        no ledger, is in use, or cannot be written.
        """
        self.path = path
        self._recording = recording
        self._file = Appended(path, RECORD, _WORDING)
        self._records = {record.key: record for record in self._file.found}

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
        """Let another process have the file."""
        self._file.close()

    def find(self, kind: type[R], key: str) -> R | None:
        """The record of a key, if this search, or the recording it replays, has made it."""
        found = self._records.get(key)
        if found is None and self._recording is not None and issubclass(kind, EFFECTS):
            found = self._recording.find(kind, key)
            if found is not None:
                self.put(found)
        if found is None:
            return None
        if not isinstance(found, kind):
            raise SearchError(f"ledger {self.path}: {key} is a {found.kind}, not a {kind.__name__}")
        return found

    def put(self, record: R) -> R:
        """Append a record; one whose key is there must say the same, and the old one is returned.

        Raises :class:`SearchError` where it says something else, which is a ledger of another
        search or of another version, or where the disk does not take it.
        """
        known = self._records.get(record.key)
        if known is not None:
            if not isinstance(known, type(record)) or content(known) != content(record):
                raise SearchError(
                    f"ledger {self.path}: {record.key} does not follow from what is recorded -> "
                    "resume with the version and the data that began it, or begin a new ledger"
                )
            return known
        self._file.append([record])
        self._records[record.key] = record
        return record

    def digest(self) -> str:
        """SHA-256 of the content of all records, whatever their order and clocks."""
        lines = sorted(f"{key} {content(record)}" for key, record in self._records.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(path: Path) -> list[Record]:
    """The complete records of a ledger that another process may be writing."""
    return appended.read(path, RECORD, _WORDING)
