"""Crash-safe append-only JSONL file of pydantic records.

A record is on the disk before ``append`` returns. A killed process leaves at most one incomplete
line at the end, which is removed when the file is opened again; a full disk leaves none. One
process at a time may write to a file; any number may read it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_autoprune.errors import AutopruneError

R = TypeVar("R")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FrozenModel(BaseModel):
    """Base of all that is recorded: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class FileErrors:
    """Exception type and messages for a record file that cannot be used."""

    error_type: type[AutopruneError]
    file_label: str
    """Prefix before the path in every message; may be empty."""
    writer: str
    """Process that may hold the lock, such as "another search"."""
    fix_locked: str
    fix_disk_full: str
    fix_inaccessible: str
    fix_invalid_line: str

    def invalid_line(self, path: Path, number: int, error: ValidationError) -> AutopruneError:
        """Error for line ``number``, counted from 1, that is not a valid record."""
        what = error.errors(include_url=False)[0]["msg"]
        return self.error_type(
            f"{self._label(path)}, line {number}: not a record of this version ({what}) -> "
            f"{self.fix_invalid_line}"
        )

    def inaccessible(self, path: Path, error: OSError) -> AutopruneError:
        """Error for an operating system failure, with the fix for its cause."""
        reason, fix = error.strerror or str(error), self.fix_inaccessible
        if error.errno in _DISK_FULL:
            fix = self.fix_disk_full
        elif isinstance(error, BlockingIOError):
            reason, fix = f"{self.writer} is writing it", self.fix_locked
        return self.error_type(f"{self._label(path)}: {reason} -> {fix}")

    def _label(self, path: Path) -> str:
        return f"{self.file_label} {path}".lstrip()


class RecordFile(Generic[R]):
    """An open record file that is locked for writing by this process, until it is closed.

    ``records`` are those that it contained when it was opened.
    """

    def __init__(
        self,
        path: Path,
        adapter: TypeAdapter[R],
        errors: FileErrors,
        *,
        exclude_none: bool = False,
    ) -> None:
        """Open or create the file and its folders, and remove an incomplete last line.

        With ``exclude_none``, fields that are None are not written. Raises ``errors.error_type``
        for a file with other content, which is left unchanged; that another process is writing; or
        that cannot be written.
        """
        self.path = path
        self._adapter, self._errors, self._exclude_none = adapter, errors, exclude_none
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise errors.inaccessible(path, error) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.records, self._size = _read_complete_lines(path, adapter, errors)
            os.ftruncate(self._handle, self._size)
        except OSError as error:
            os.close(self._handle)
            raise errors.inaccessible(path, error) from None
        except AutopruneError:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, records: Sequence[R]) -> None:
        """Write all records durably, or raise and leave the file as it was."""
        lines = b"".join(
            self._adapter.dump_json(record, exclude_none=self._exclude_none) + b"\n"
            for record in records
        )
        try:
            written = 0
            while written < len(lines):
                written += os.write(self._handle, lines[written:])
            os.fsync(self._handle)
        except OSError as error:
            # Remove what was written of the batch. If this fails too, the next process that opens
            # the file removes the incomplete line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise self._errors.inaccessible(self.path, error) from None
        self._size += len(lines)

    def close(self) -> None:
        """Release the lock and close the file."""
        os.close(self._handle)


def read_records(path: Path, adapter: TypeAdapter[R], errors: FileErrors) -> list[R]:
    """The complete records of a file, which another process may be writing.

    Raises ``errors.error_type`` for a file with other content or cannot be read.
    """
    try:
        return _read_complete_lines(path, adapter, errors)[0]
    except OSError as error:
        raise errors.inaccessible(path, error) from None


def _read_complete_lines(
    path: Path, adapter: TypeAdapter[R], errors: FileErrors
) -> tuple[list[R], int]:
    """All complete records and their size in bytes, without an incomplete last line."""
    records: list[R] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            complete = line.endswith(b"\n")
            try:
                record = adapter.validate_json(line)
            except ValidationError as error:
                # Lines after an incomplete one mean that its writer has completed it meanwhile.
                if (complete and file.readline()) or not _is_truncated(line, error):
                    raise errors.invalid_line(path, number, error) from None
                break
            if not complete:
                break
            records.append(record)
            size += len(line)
    return records, size


def _is_truncated(line: bytes, error: ValidationError) -> bool:
    """Whether the last line may be a truncated record, rather than content of another format.

    A truncated object is never valid JSON. A file system may leave zero bytes where a power
    failure interrupted a write.
    """
    starts_as_record = not line.strip() or line.startswith((b"{", b"\0"))
    return starts_as_record and error.errors(include_url=False)[0]["type"] == "json_invalid"
