from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter

from offline_search.ledger.record_file import FileErrors, RecordFile, read_records
from vllm_autoprune.errors import AutopruneError


class Note(BaseModel):
    number: int
    text: str | None = None


class NotesError(AutopruneError):
    """What the user of these notes is told."""


NOTE = TypeAdapter(Note)
ERRORS = FileErrors(
    error_type=NotesError,
    file_label="notes",
    writer="another author",
    fix_locked="wait",
    fix_disk_full="make room",
    fix_inaccessible="choose another place",
    fix_invalid_line="choose another file",
)


@contextmanager
def opened(path: Path) -> Iterator[RecordFile[Note]]:
    file = RecordFile(path, NOTE, ERRORS)
    try:
        yield file
    finally:
        file.close()


def numbers(path: Path) -> list[int]:
    return [note.number for note in read_records(path, NOTE, ERRORS)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two notes, in a folder that was not there."""
    path = tmp_path / "a" / "b" / "notes.jsonl"
    with opened(path) as file:
        file.append([Note(number=1, text="one"), Note(number=2)])
    return path


def test_one_record_a_line_in_the_order_they_came(path: Path) -> None:
    with opened(path) as file:
        assert file.records == [Note(number=1, text="one"), Note(number=2)]
        file.append([Note(number=3)], exclude_none=True)
        file.append([])
        assert numbers(path) == [1, 2, 3]
    assert path.read_text().splitlines() == [
        '{"number":1,"text":"one"}',
        '{"number":2,"text":null}',
        '{"number":3}',
    ]


def test_wherever_a_kill_cuts_the_whole_lines_before_are_kept(path: Path) -> None:
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        whole = [1, 2][: content[:end].count(b"\n")]
        assert numbers(path) == whole
        with opened(path) as file:
            file.append([Note(number=3)])
        assert numbers(path) == [*whole, 3]


@pytest.mark.parametrize("left", [b"\0" * 50, b"\0\n", b"\n", b'{"number":3,\0\0\0', b"{\xff\n"])
def test_what_a_power_cut_may_leave_at_the_end_is_removed(path: Path, left: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content + left)
    assert numbers(path) == [1, 2]
    with opened(path):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"milk, eggs", 1),
        (b"milk\neggs\n", 1),
        (b'{"name": "a state"}', 1),
        (b'{\n  "name": "a state"\n}\n', 1),
        (b'{"number":1}\n{"number":"many"}\n', 2),
        (b'{"number":1}\n{"num\n{"number":3}\n', 2),
        (b'{"number":1}\n[]', 2),
    ],
)
def test_a_file_of_something_else_is_refused_by_line_and_left_alone(
    tmp_path: Path, content: bytes, line: int
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    told = f"^notes {path}, line {line}: not a record of this version .* -> choose another file$"
    with pytest.raises(NotesError, match=told):
        RecordFile(path, NOTE, ERRORS)
    with pytest.raises(NotesError, match=told):
        read_records(path, NOTE, ERRORS)
    assert path.read_bytes() == content


def test_what_was_refused_may_be_opened_once_it_is_mended(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + b"milk\n")
    with pytest.raises(NotesError):
        RecordFile(path, NOTE, ERRORS)
    path.write_bytes(content)
    with opened(path) as file:  # the refusal let go of the lock
        assert len(file.records) == 2


def test_one_at_a_time_may_write_and_anybody_read(path: Path) -> None:
    with opened(path):
        with pytest.raises(NotesError, match=r"notes\.jsonl: another author is writing it -> wait"):
            RecordFile(path, NOTE, ERRORS)
        assert numbers(path) == [1, 2]
    with opened(path) as file:
        file.append([Note(number=3)])


def test_half_a_line_that_is_being_written_is_not_read_yet(path: Path) -> None:
    with opened(path):
        content = path.read_bytes()
        path.write_bytes(content + b'{"number":')
        assert numbers(path) == [1, 2]
        path.write_bytes(content + b'{"number":3}\n')
        assert numbers(path) == [1, 2, 3]


def test_where_there_is_no_room_nothing_of_a_batch_is_left(path: Path) -> None:
    content = path.read_bytes()
    batch = [Note(number=number) for number in range(3, 9)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as file:
        # Room for one and a half of them: a real write that ends half way, and then an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 40, hard))
        try:
            with pytest.raises(NotesError, match=r"File too large -> make room$"):
                file.append(batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == content
        file.append(batch)
    assert numbers(path) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_tells_only_when_asked_for_the_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    content = path.read_bytes()
    asked: list[bytes] = []

    def full(handle: int) -> None:
        asked.append(path.read_bytes())
        raise OSError(number, os.strerror(number))

    with opened(path) as file:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(NotesError, match=f"{os.strerror(number)} -> make room$"):
                file.append([Note(number=3)])
        assert asked == [content + b'{"number":3,"text":null}\n']
        assert path.read_bytes() == content
        file.append([Note(number=3)])
    assert numbers(path) == [1, 2, 3]


def test_a_disk_that_fails_altogether_is_told_as_what_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(path) as file, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        patched.setattr(os, "ftruncate", failing)
        with pytest.raises(NotesError, match=r"Input/output error -> choose another place$"):
            file.append([Note(number=3)])


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(NotesError, match=f"^notes {tmp_path}: Is a directory -> choose another"):
        RecordFile(tmp_path, NOTE, ERRORS)
    (tmp_path / "file").touch()
    with pytest.raises(NotesError, match="choose another place"):
        RecordFile(tmp_path / "file" / "notes", NOTE, ERRORS)
    with pytest.raises(NotesError, match="No such file or directory"):
        read_records(tmp_path / "nowhere", NOTE, ERRORS)


def test_without_a_noun_the_path_speaks_for_itself(tmp_path: Path) -> None:
    bare = FileErrors(NotesError, "", "a", "w", "r", "elsewhere", "o")
    with pytest.raises(NotesError, match=f"^{tmp_path}: Is a directory -> elsewhere$"):
        read_records(tmp_path, NOTE, bare)
