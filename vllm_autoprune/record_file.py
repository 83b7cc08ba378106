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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_autoprune.errors import AutopruneError

_R = TypeVar("_R")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FrozenModel(BaseModel):
    """Base model of records: it is immutable and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RecordFile(Generic[_R]):
    """An open record file that is locked for writing by this process, until it is closed.

    ``records`` are those that the file had when it was opened. A subclass defines their type.
    """

    adapter: ClassVar[TypeAdapter[Any]]
    error_type: ClassVar[type[AutopruneError]]

    def __init__(self, path: Path) -> None:
        """Open or create the file and its folders, and remove an incomplete last line.

        Raises ``error_type`` if another process is writing the file, if it cannot be written, or
        if it has other content, which is left unchanged.
        """
        self.path = path
        with contextlib.ExitStack() as on_error, self._reporting():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that a full disk fails the write itself, which can then be undone.
            self._file = on_error.enter_context(path.open("ab", buffering=0))
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.records, self._size = self._read_complete_lines(path)
            self._file.truncate(self._size)
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, records: Sequence[_R]) -> None:
        """Write all records durably, or raise and leave the file as it was."""
        lines = b"".join(self.adapter.dump_json(record) + b"\n" for record in records)
        with self._reporting():
            try:
                written = 0
                while written < len(lines):
                    written += self._file.write(lines[written:])
                os.fsync(self._file)
            except OSError:
                # If this fails too, the incomplete line is removed when the file is next opened.
                with contextlib.suppress(OSError):
                    self._file.truncate(self._size)
                raise
        self._size += len(lines)

    def close(self) -> None:
        """Release the lock and close the file; remove the file if it has no record."""
        if not self._file.closed and self._size == 0:
            # A run that is refused at its start leaves no file behind.
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Convert an OSError to ``error_type``, with the path and a fix."""
        try:
            yield
        except BlockingIOError:
            reason = "another process is writing it"
            fix = "wait for it, or name another place"
        except OSError as error:
            reason = error.strerror or str(error)
            fix = "name a place that can be written"
            if error.errno in _DISK_FULL:
                fix = "make room and resume: everything up to here is kept"
        else:
            return
        raise self.error_type.of(str(self.path), reason, fix)

    @classmethod
    def read(cls, path: Path, fix: str) -> list[_R]:
        """Read the complete records of a file, which another process may be writing.

        Raises ``error_type`` for other content. If the file cannot be read, the error has ``fix``.
        """
        try:
            return cls._read_complete_lines(path)[0]
        except OSError as error:
            reason = error.strerror or str(error)
            raise cls.error_type.of(str(path), reason, fix) from None

    @classmethod
    def _read_complete_lines(cls, path: Path) -> tuple[list[_R], int]:
        """All complete records and their size in bytes, without an incomplete last line."""
        records: list[_R] = []
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = cls.adapter.validate_json(line)
            except ValidationError as error:
                detail = error.errors(include_url=False)[0]
                # The last line may be a truncated record, rather than content of another format.
                # A truncated record is never valid JSON, and may be zero bytes after a power
                # failure.
                truncated = detail["type"] == "json_invalid" and (
                    not line.strip() or line.startswith((b"{", b"\0"))
                )
                if truncated and not any(lines[number:]):
                    break
                what = f"not a record of this version ({detail['msg']})"
                fix = "name another file, or use the version that wrote it"
                raise cls.error_type.of(f"{path}:{number}", what, fix) from None
            if number < len(lines):  # else the end of the line is not on the disk
                records.append(record)
        return records, sum(len(line) + 1 for line in lines[: len(records)])
