from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.record_file import RecordFile, read_records


class Note(BaseModel):
    number: int
    text: str | None = None


class NotesError(AutopruneError):
    """Error of the file under test."""


NOTE = TypeAdapter(Note)


def open_notes(path: Path) -> RecordFile[Note]:
    return RecordFile(path, NOTE, NotesError)


def numbers(path: Path) -> list[int]:
    return [note.number for note in read_records(path, NOTE, NotesError, "name one")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two notes, in a folder that writing it creates."""
    path = tmp_path / "a" / "b" / "notes.jsonl"
    with open_notes(path) as file:
        file.append([Note(number=1, text="one"), Note(number=2)])
    return path


def test_records_are_lines_in_order(path: Path) -> None:
    with RecordFile(path, NOTE, NotesError, exclude_none=True) as file:
        assert file.records == [Note(number=1, text="one"), Note(number=2)]
        file.append([Note(number=3)])
        file.append([])
        assert numbers(path) == [1, 2, 3]
    assert path.read_text().splitlines() == [
        '{"number":1,"text":"one"}',
        '{"number":2,"text":null}',
        '{"number":3}',
    ]


def test_complete_lines_survive_truncation_anywhere(path: Path) -> None:
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        complete = [1, 2][: content[:end].count(b"\n")]
        assert numbers(path) == complete
        with open_notes(path) as file:
            file.append([Note(number=3)])
        assert numbers(path) == [*complete, 3]


@pytest.mark.parametrize("remains", [b"\0" * 50, b"\0\n", b"\n", b'{"number":3,\0\0\0', b"{\xff\n"])
def test_remains_of_a_power_failure_are_removed(path: Path, remains: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content + remains)
    assert numbers(path) == [1, 2]
    with open_notes(path):
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
def test_foreign_content_is_refused_and_left_unchanged(
    tmp_path: Path, content: bytes, line: int
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    message = f"^{path}:{line}: not a record of this version .* -> name another file"
    with pytest.raises(NotesError, match=message):
        open_notes(path)
    with pytest.raises(NotesError, match=message):
        numbers(path)
    assert path.read_bytes() == content


def test_one_process_writes_while_others_read_complete_lines(path: Path) -> None:
    with open_notes(path):
        with pytest.raises(
            NotesError, match=r"notes\.jsonl: another process is writing it -> wait"
        ):
            open_notes(path)
        content = path.read_bytes()
        path.write_bytes(content + b'{"number":')
        assert numbers(path) == [1, 2]
        path.write_bytes(content + b'{"number":3}\n')
        assert numbers(path) == [1, 2, 3]
    path.write_bytes(content + b"milk\n")
    with pytest.raises(NotesError):
        open_notes(path)
    path.write_bytes(content)
    with open_notes(path) as file:  # closing and the refusal let go of the lock
        assert len(file.records) == 2


def test_a_full_disk_leaves_nothing_of_a_batch(path: Path) -> None:
    content = path.read_bytes()
    batch = [Note(number=number) for number in range(3, 9)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_notes(path) as file:
        # Room for one and a half of them: a real write that ends half way, and then an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 40, hard))
        try:
            with pytest.raises(NotesError, match=r"File too large -> make room and resume"):
                file.append(batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == content
        file.append(batch)
    assert numbers(path) == [1, 2, 3, 4, 5, 6, 7, 8]


def failing(number: int) -> Callable[..., None]:
    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_reported_by_fsync(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    content = path.read_bytes()
    with open_notes(path) as file:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing(number))
            with pytest.raises(NotesError, match="-> make room and resume"):
                file.append([Note(number=3)])
        assert path.read_bytes() == content
        file.append([Note(number=3)])
    assert numbers(path) == [1, 2, 3]


def test_a_broken_disk_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_notes(path) as file, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(errno.EIO))
        patched.setattr(os, "ftruncate", failing(errno.EIO))
        with pytest.raises(
            NotesError, match=r"Input/output error -> name a place that can be written$"
        ):
            file.append([Note(number=3)])


def test_an_unusable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, f"^{tmp_path}: Is a directory -> name a place"),
        (tmp_path / "file" / "notes", "name a place that can be written"),
    ):
        with pytest.raises(NotesError, match=message):
            open_notes(path)
    with pytest.raises(NotesError, match=r"No such file or directory -> name one$"):
        numbers(tmp_path / "nowhere")
