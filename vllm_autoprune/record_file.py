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
from pathlib import Path
from typing import Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_autoprune.errors import AutopruneError

_R = TypeVar("_R")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FrozenModel(BaseModel):
    """Base of all that is recorded: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RecordFile(Generic[_R]):
    """An open record file that is locked for writing by this process, until it is closed.

    ``records`` are those that it contained when it was opened.
    """

    def __init__(
        self,
        path: Path,
        adapter: TypeAdapter[_R],
        error_type: type[AutopruneError],
        *,
        exclude_none: bool = False,
    ) -> None:
        """Open or create the file and its folders, and remove an incomplete last line.

        With ``exclude_none``, fields that are None are not written. Raises ``error_type`` for a
        file with other content, which is left unchanged; that another process is writing; or that
        cannot be written.
        """
        self.path = path
        self._adapter, self._error_type, self._exclude_none = adapter, error_type, exclude_none
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._inaccessible(error) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.records, self._size = _read_complete_lines(path, adapter, error_type)
            os.ftruncate(self._handle, self._size)
        except OSError as error:
            os.close(self._handle)
            raise self._inaccessible(error) from None
        except AutopruneError:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, records: Sequence[_R]) -> None:
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
            raise self._inaccessible(error) from None
        self._size += len(lines)

    def close(self) -> None:
        """Release the lock and close the file."""
        os.close(self._handle)

    def _inaccessible(self, error: OSError) -> AutopruneError:
        reason, fix = error.strerror or str(error), "name a place that can be written"
        if error.errno in _DISK_FULL:
            fix = "make room and resume: everything up to here is kept"
        elif isinstance(error, BlockingIOError):
            reason = "another process is writing it"
            fix = "wait for it, or name another place"
        return self._error_type(f"{self.path}: {reason} -> {fix}")


def read_records(
    path: Path, adapter: TypeAdapter[_R], error_type: type[AutopruneError], fix: str
) -> list[_R]:
    """The complete records of a file, which another process may be writing.

    Raises ``error_type`` for a file with other content, or that cannot be read: then with ``fix``.
    """
    try:
        return _read_complete_lines(path, adapter, error_type)[0]
    except OSError as error:
        raise error_type(f"{path}: {error.strerror or error} -> {fix}") from None


def _read_complete_lines(
    path: Path, adapter: TypeAdapter[_R], error_type: type[AutopruneError]
) -> tuple[list[_R], int]:
    """All complete records and their size in bytes, without an incomplete last line."""
    records: list[_R] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            complete = line.endswith(b"\n")
            try:
                record = adapter.validate_json(line)
            except ValidationError as error:
                detail = error.errors(include_url=False)[0]
                # The last line may be a truncated record, rather than content of another format: a
                # truncated object is never valid JSON, and a file system may leave zero bytes where
                # a power failure interrupted a write.
                truncated = detail["type"] == "json_invalid" and (
                    not line.strip() or line.startswith((b"{", b"\0"))
                )
                # Lines after an incomplete one mean that its writer has completed it meanwhile.
                if (complete and file.readline()) or not truncated:
                    what = detail["msg"]
                    raise error_type(
                        f"{path}:{number}: not a record of this version ({what}) -> name another "
                        "file, or use the version that wrote it"
                    ) from None
                break
            if not complete:
                break
            records.append(record)
            size += len(line)
    return records, size
