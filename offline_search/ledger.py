"""The ledger: an append-only JSONL file, the only thing a search remembers.

Knows nothing about what a search does. A record is on the disk before anything follows from it,
so a process that is killed loses what was in flight and no more: the search runs again from its
start, and finds in the ledger whatever it has already done.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import ValidationError

from offline_search.records import EFFECTS, RECORD, Record, content
from vllm_autoprune.errors import SearchError

R = TypeVar("R", bound=Record)


class Ledger:
    """Records by key, in the order they came. One process at a time writes to a file."""

    def __init__(self, path: Path, recording: Ledger | None = None) -> None:
        """Open or create; effects that are not in the file are taken from a ``recording``.

        A last line that a kill cut off is removed. Raises :class:`SearchError` for a file that is
        no ledger, is in use, or cannot be written.
        """
        self.path = path
        self._recording = recording
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            records, self._size = _complete(path)
            os.ftruncate(self._handle, self._size)
        except OSError as error:
            os.close(self._handle)
            raise _unusable(path, error) from None
        except SearchError:
            os.close(self._handle)
            raise
        self._records = {record.key: record for record in records}

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
        os.close(self._handle)

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
        self._append(RECORD.dump_json(record) + b"\n")
        self._records[record.key] = record
        return record

    def digest(self) -> str:
        """SHA-256 of the content of all records, whatever their order and clocks."""
        lines = sorted(f"{key} {content(record)}" for key, record in self._records.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _append(self, line: bytes) -> None:
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
            os.fsync(self._handle)
        except OSError as error:
            # Half a line would be taken for the work of a kill, but leave nothing to guess.
            os.ftruncate(self._handle, self._size)
            raise _unusable(self.path, error) from None
        self._size += len(line)


def read(path: Path) -> list[Record]:
    """The complete records of a ledger that another process may be writing."""
    try:
        return _complete(path)[0]
    except OSError as error:
        raise _unusable(path, error) from None


def _complete(path: Path) -> tuple[list[Record], int]:
    """All complete records, and the bytes that they take; the rest is what a kill cut off."""
    records: list[Record] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                records.append(RECORD.validate_json(line))
            except ValidationError as error:
                if file.readline() or _is_json(line):
                    raise _foreign(path, number, error) from None
                break
            size += len(line)
    return records, size


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _foreign(path: Path, number: int, error: ValidationError) -> SearchError:
    what = error.errors(include_url=False)[0]["msg"]
    return SearchError(
        f"ledger {path}, line {number}: not a record of this version ({what}) -> "
        "give another file, or the version that wrote it"
    )


def _unusable(path: Path, error: OSError) -> SearchError:
    reason, mend = error.strerror or str(error), "choose a file that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        mend = "make room and resume: everything up to here is kept"
    elif error.errno in (errno.EAGAIN, errno.EACCES) and isinstance(error, BlockingIOError):
        reason, mend = "another search is writing it", "wait for it, or begin another ledger"
    return SearchError(f"ledger {path}: {reason} -> {mend}")
