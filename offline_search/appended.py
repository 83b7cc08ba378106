"""An append-only file of JSON records, one a line, that outlives kills and full disks.

Knows nothing about what a record says: that is the type adapter's matter, and the words for whoever
chose the file are the caller's.

A record is on the disk before ``append`` returns. A kill leaves at most half a line at the end,
which is cut off when the file is opened again; a full disk leaves none. One process at a time
writes to a file; any number may read it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from vllm_autoprune.errors import AutopruneError

R = TypeVar("R")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Wording:
    """How a file that cannot be used is told, and what to do about it."""

    error: type[AutopruneError]
    noun: str
    """What the file is, before its path; may be empty."""
    writer: str
    """Who else may hold the file."""
    wait: str
    """What to do while another process holds it."""
    room: str
    """What to do where the disk is full."""
    place: str
    """What to do where the file cannot be opened, read or written at all."""
    other: str
    """What to do about a line that is no record of this version."""

    def foreign(self, path: Path, number: int, error: ValidationError) -> AutopruneError:
        """Line ``number``, from 1, is no record."""
        what = error.errors(include_url=False)[0]["msg"]
        return self.error(
            f"{self._named(path)}, line {number}: not a record of this version ({what}) -> "
            f"{self.other}"
        )

    def unusable(self, path: Path, error: OSError) -> AutopruneError:
        """The system refuses."""
        reason, fix = error.strerror or str(error), self.place
        if error.errno in _FULL:
            fix = self.room
        elif isinstance(error, BlockingIOError):
            reason, fix = f"{self.writer} is writing it", self.wait
        return self.error(f"{self._named(path)}: {reason} -> {fix}")

    def _named(self, path: Path) -> str:
        return f"{self.noun} {path}".lstrip()


class Appended(Generic[R]):
    """A file that this process alone adds to, until it is closed.

    ``found`` are the records that were there when it was opened.
    """

    def __init__(self, path: Path, adapter: TypeAdapter[R], wording: Wording) -> None:
        """Open or create, folders too; half a line at the end is removed.

        Raises the wording's error for a file that holds something else, which is left as it is;
        that is in use; or that cannot be written.
        """
        self._path, self._adapter, self._wording = path, adapter, wording
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise wording.unusable(path, error) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.found, self._size = _complete(path, adapter, wording)
            os.ftruncate(self._handle, self._size)
        except OSError as error:
            os.close(self._handle)
            raise wording.unusable(path, error) from None
        except AutopruneError:
            os.close(self._handle)
            raise

    def append(self, records: Sequence[R], *, exclude_none: bool = False) -> None:
        """Add all of them, or none where the disk does not take them: then raises.

        With ``exclude_none``, fields that are None are not written.
        """
        lines = b"".join(
            self._adapter.dump_json(record, exclude_none=exclude_none) + b"\n" for record in records
        )
        try:
            written = 0
            while written < len(lines):
                written += os.write(self._handle, lines[written:])
            os.fsync(self._handle)
        except OSError as error:
            # Half a line would be taken for the work of a kill, but leave nothing to guess. Where
            # even this fails, the next one to open the file does it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise self._wording.unusable(self._path, error) from None
        self._size += len(lines)

    def close(self) -> None:
        """Let another process have the file."""
        os.close(self._handle)


def read(path: Path, adapter: TypeAdapter[R], wording: Wording) -> list[R]:
    """The complete records of a file that another process may be writing.

    Raises the wording's error for a file that holds something else, or cannot be read.
    """
    try:
        return _complete(path, adapter, wording)[0]
    except OSError as error:
        raise wording.unusable(path, error) from None


def _complete(path: Path, adapter: TypeAdapter[R], wording: Wording) -> tuple[list[R], int]:
    """All complete records, and the bytes that they take; the rest is what a kill cut off."""
    records: list[R] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            whole = line.endswith(b"\n")
            try:
                record = adapter.validate_json(line)
            except ValidationError as error:
                # What follows half a line was written since: the writer has only just ended it.
                if (whole and file.readline()) or not _cut_off(line, error):
                    raise wording.foreign(path, number, error) from None
                break
            if not whole:
                break
            records.append(record)
            size += len(line)
    return records, size


def _cut_off(line: bytes, error: ValidationError) -> bool:
    """Whether the last line may be the beginning of a record; anything else is somebody's file.

    The beginning of an object is never JSON. Zeros are what a file system may leave of a write
    that a power cut ended.
    """
    begun = not line.strip() or line.startswith((b"{", b"\0"))
    return begun and error.errors(include_url=False)[0]["type"] == "json_invalid"
