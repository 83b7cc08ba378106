"""Record files: what is on the disk after a kill, a power failure, a full disk, a second writer."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.tables import parametrize_from_file
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.record_file import RecordFile


class Note(BaseModel):
    number: int
    text: str | None = None


class NotesError(AutopruneError):
    """Error of the file under test."""


class Notes(RecordFile[Note]):
    """The file under test."""

    adapter = TypeAdapter(Note)
    error_type = NotesError


def numbers(path: Path) -> list[int]:
    return [note.number for note in Notes.read(path, "name one")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two notes, in folders that writing it creates."""
    path = tmp_path / "a" / "b" / "notes.jsonl"
    with Notes(path) as file:
        file.append([Note(number=1, text="one"), Note(number=2)])
    return path


def test_complete_lines_survive_truncation_anywhere(path: Path) -> None:
    content = path.read_bytes()
    assert content == b'{"number":1,"text":"one"}\n{"number":2,"text":null}\n'
    for end in range(len(content)):
        path.write_bytes(content[:end])
        complete = [1, 2][: content[:end].count(b"\n")]
        assert numbers(path) == complete
        with Notes(path) as file:
            assert [note.number for note in file.records] == complete
            file.append([Note(number=3)])
        assert numbers(path) == [*complete, 3]


@pytest.mark.parametrize(
    "remains", [b"\0" * 50, b"\n", b'{"number":3,\0\0\0', b"{\xff\n"]
)
def test_remains_of_a_power_failure_are_removed(path: Path, remains: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content + remains)
    assert numbers(path) == [1, 2]
    Notes(path).close()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"milk, eggs", 1),
        (b'{\n  "name": "a state"\n}\n', 1),
        (b'{"number":1}\n{"number":"many"}\n', 2),
        (b'{"number":1}\n{"num\n{"number":3}\n', 2),
    ],
)
def test_foreign_content_is_refused_and_left_unchanged(
    tmp_path: Path, content: bytes, line: int
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    for read in (Notes, numbers):
        with pytest.raises(
            NotesError, match=f"^{path}:{line}: not a record .* -> name another"
        ):
            read(path)
    assert path.read_bytes() == content


def test_one_process_writes_while_others_read_complete_lines(path: Path) -> None:
    content = path.read_bytes()
    with Notes(path):
        with pytest.raises(NotesError, match="another process is writing it -> wait"):
            Notes(path)
        path.write_bytes(content + b'{"number":')
        assert numbers(path) == [1, 2]
        path.write_bytes(content + b'{"number":3}\n')
        assert numbers(path) == [1, 2, 3]
    path.write_bytes(content + b"milk\n")
    with pytest.raises(NotesError):
        Notes(path)
    path.write_bytes(content)
    Notes(path).close()  # closing and the refusal have let go of the lock


@parametrize_from_file("number", "message")
def test_a_disk_that_fails_leaves_nothing_of_a_batch(
    path: Path, number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports an error when it is waited for; 0: a write ends half way, and then fails."""
    content = path.read_bytes()
    batch = [Note(number=number) for number in range(3, 9)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail(handle: object) -> None:
        raise OSError(number, os.strerror(number))

    with Notes(path) as file:
        with monkeypatch.context() as patch:
            if number:
                patch.setattr(os, "fsync", fail)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (80, hard))
            try:
                with pytest.raises(NotesError, match=message):
                    file.append(batch)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == content
        file.append(batch)
    assert numbers(path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_file_without_a_record_is_removed(path: Path) -> None:
    """Also one with an incomplete record alone, as a killed process leaves it."""
    for content in (b"", b'{"number":'):
        path.write_bytes(content)
        Notes(path).close()
        assert not path.exists()


def test_an_unusable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "notes"):
        with pytest.raises(NotesError, match="-> name a place that can be written"):
            Notes(path)
    with pytest.raises(NotesError, match=r"No such file or directory -> name one$"):
        numbers(tmp_path / "nowhere")
