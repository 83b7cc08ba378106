"""Images and questions of one's own: a folder, a JSONL file, or a Hugging Face data set on disk.

* Folder: its images, in order of their names; questions from ``prompts.txt`` in it, one a line.
* JSONL: one object a line, with ``image`` (a path relative to the file) or ``images``, and with
  ``question`` or ``prompt``.
* Data set as ``datasets.save_to_disk`` writes it: its first column of images, and its column
  ``question`` or ``prompt``. It needs the package ``datasets``.

Where there are no questions, the load test draws its own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from benchmarks.common import BenchmarkError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
PROMPTS = "prompts.txt"
QUESTION_FIELDS = ("question", "prompt")
_SIGNATURES = {
    b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp",
}  # fmt: skip

Read = Callable[[], bytes]


@dataclass(frozen=True)
class OwnItem:
    """Images that go together, read when they are needed, and their question, if there is one."""

    images: tuple[Read, ...]
    question: str | None


@dataclass(frozen=True)
class OwnData:
    """All items, and a digest of their names, sizes and questions."""

    items: Sequence[OwnItem]
    digest: str


@lru_cache(maxsize=2)
def open_data(path: Path) -> OwnData:
    """The data at a path; raises :class:`BenchmarkError` with the fix for what cannot be read."""
    if path.is_dir() and (path / "state.json").is_file():
        items, described = _read_data_set(path)
    elif path.is_dir() and (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        raise BenchmarkError(f"--data {path}: has splits -> name one: {path / str(splits[0])}")
    elif path.is_dir():
        items, described = _read_folder(path)
    elif path.suffix == ".jsonl" and path.is_file():
        items, described = _read_lines(path)
    else:
        raise BenchmarkError(
            f"--data {path}: is no folder and no .jsonl file -> give a folder of images, a JSONL "
            "file, or a data set saved by datasets.save_to_disk"
        )
    if not items:
        raise BenchmarkError(
            f"--data {path}: contains no images -> put {', '.join(SUFFIXES)} files there"
        )
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    return OwnData(items, digest)


def as_data_url(data: bytes) -> str:
    """An image as chat clients send it; raises :class:`BenchmarkError` for another file."""
    kinds = [kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)]
    if not kinds:
        raise BenchmarkError("--data: a file is no JPEG, PNG, GIF or WebP -> convert or remove it")
    return f"data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}"


Described = list[list[object]]
"""What the digest covers: of each item the names and sizes of its images, and its question."""


def _read_folder(path: Path) -> tuple[list[OwnItem], Described]:
    images = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    prompts: list[str] = []
    if (path / PROMPTS).is_file():
        lines = (path / PROMPTS).read_text(encoding="utf-8").splitlines()
        prompts = [line.strip() for line in lines if line.strip()]
    items = []
    described: Described = []
    for number, image in enumerate(images):
        question = prompts[number % len(prompts)] if prompts else None
        items.append(OwnItem((image.read_bytes,), question))
        described.append([image.name, image.stat().st_size, question])
    return items, described


def _read_lines(path: Path) -> tuple[list[OwnItem], Described]:
    items = []
    described: Described = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"--data {path} line {number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise BenchmarkError(f"{where}: {error} -> write one JSON object a line") from None
        names = content.get("images", content.get("image")) if isinstance(content, dict) else None
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise BenchmarkError(f'{where}: no "image" -> give a path, or a list as "images"')
        files = [path.parent / name for name in names]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise BenchmarkError(f"{where}: {missing[0]} does not exist -> fix the path")
        question = _find_question(content)
        items.append(OwnItem(tuple(file.read_bytes for file in files), question))
        described.append([names, [file.stat().st_size for file in files], question])
    return items, described


def _read_data_set(path: Path) -> tuple[list[OwnItem], Described]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise BenchmarkError(
            f"--data {path}: is a Hugging Face data set -> pip install datasets"
        ) from None
    # In Arrow's format images are bytes, as they were saved; otherwise they would be decoded.
    rows = datasets.load_from_disk(str(path)).with_format("arrow")
    items = []
    described: Described = []
    for number in range(len(rows)):
        row = _read_row(rows, number)
        column = next((name for name, cell in row.items() if _list_images(cell)), None)
        if column is None:
            raise BenchmarkError(
                f"--data {path}: row {number} has no image, only {', '.join(row)} -> cast a column "
                "to datasets.Image"
            )
        sizes = [len(image) for image in _list_images(row[column])]
        images = tuple(
            partial(_read_cell, rows, number, column, place) for place in range(len(sizes))
        )
        items.append(OwnItem(images, _find_question(row)))
        described.append([number, sizes, _find_question(row)])
    return items, described


class Rows(Protocol):
    """The part of ``datasets.Dataset`` that is used."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> ArrowTable: ...


class ArrowTable(Protocol):
    """The part of ``pyarrow.Table`` that is used."""

    def to_pylist(self) -> list[dict[str, object]]:
        """Rows as dictionaries."""


def _read_row(rows: Rows, number: int) -> dict[str, object]:
    return rows[number : number + 1].to_pylist()[0]


def _read_cell(rows: Rows, number: int, column: str, place: int) -> bytes:
    return _list_images(_read_row(rows, number)[column])[place]


def _list_images(cell: object) -> list[bytes]:
    """The images of a cell; an image that was saved as a path is read from there."""
    cells = cell if isinstance(cell, list) else [cell]
    images = []
    for each in cells:
        if not isinstance(each, dict) or not {"bytes", "path"} <= each.keys():
            return []
        data = each["bytes"]
        images.append(data if isinstance(data, bytes) else Path(str(each["path"])).read_bytes())
    return images


def _find_question(content: Mapping[str, object]) -> str | None:
    for name in QUESTION_FIELDS:
        value = content.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return None
