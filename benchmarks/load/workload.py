"""Requests of a workload: drawn by seed or from own data, and encoded before any clock runs.

A folder has ``workload.json``, ``requests.jsonl`` (one line a request) and ``bodies.bin``, the
request bodies one after the other. All servers that are compared are sent the same folder.

Own images and questions come from

* a folder: its images, in order of their names; questions from ``prompts.txt`` in it, one a line;
* a JSONL file: one object a line, with ``image`` (a path relative to the file) or ``images``, and
  with ``question`` or ``prompt``;
* a data set that ``datasets.save_to_disk`` wrote: its first column of images, and its column
  ``question`` or ``prompt``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from benchmarks.load.settings import Format, RequestOptions, Workload

T = TypeVar("T")

WORKLOAD, REQUESTS, BODIES = "workload.json", "requests.jsonl", "bodies.bin"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
_SIGNATURES = {
    b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp",
}  # fmt: skip
_WORDS = (
    "what", "which", "where", "how", "many", "is", "are", "there", "does", "the", "a", "an",
    "this", "that", "on", "under", "behind", "beside", "between", "near", "left", "right",
    "top", "bottom", "small", "large", "old", "new", "red", "blue", "green", "white", "black",
    "bright", "dark", "person", "people", "child", "dog", "cat", "car", "bus", "bicycle",
    "street", "tree", "house", "window", "door", "table", "chair", "cup", "plate", "book",
    "phone", "sign", "letter", "number", "clock", "shirt", "hat", "hand", "face", "sky",
    "water", "grass", "road", "wall", "holding", "wearing", "standing", "sitting", "looking",
    "made", "written", "shown", "visible", "closest", "colour", "shape", "picture", "photo",
    "corner", "middle", "front",
)  # fmt: skip


class PictureSpec(StrictModel):
    """One picture to be drawn; its content follows from the seed."""

    seed: int
    width: int
    height: int
    format: Format


class _OwnPicture(StrictModel):
    """One image of an item of one's own data."""

    item: int
    number: int


class Request(StrictModel):
    """One request; requests with equal pictures and question have identical bodies."""

    index: int
    pictures: tuple[PictureSpec | _OwnPicture, ...]
    question: str


class Line(StrictModel):
    """One request of a prepared folder, and the place of its body."""

    ask: Request
    offset: int
    size: int
    warm_up: bool = False


@dataclass(frozen=True)
class Prepared:
    """A workload in memory: bodies in the order in which they are due."""

    workload: Workload
    lines: tuple[Line, ...]
    bodies: bytes
    digest: str

    @property
    def measured(self) -> tuple[Line, ...]:
        """Requests that are measured."""
        return tuple(line for line in self.lines if not line.warm_up)

    @property
    def warm_up(self) -> tuple[Line, ...]:
        """Requests of the warm-up, on images of their own."""
        return tuple(line for line in self.lines if line.warm_up)

    def body(self, line: Line) -> bytes:
        """The body that is sent."""
        return self.bodies[line.offset : line.offset + line.size]


def make_workload(options: RequestOptions, model: str, loads: int = 1) -> Workload:
    """The workload of these options; raises :class:`BenchmarkError` for too few data."""
    fields = {name: getattr(options, name) for name in RequestOptions.model_fields}
    if options.data:
        path = Path(options.data).resolve()
        described = json.dumps([item.described for item in open_data(path)])
        digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        fields |= {"data": str(path), "data_digest": digest}
    workload = Workload(model=model, **fields)
    _require_items(workload, loads)
    return workload


def prepare(workload: Workload, folder: Path) -> Prepared:
    """Draw and encode all requests, unless the folder contains this workload already."""
    try:
        if (folder / WORKLOAD).is_file() and load_prepared(folder).workload == workload:
            return load_prepared(folder)
    except BenchmarkError:
        pass  # incomplete, or of another version: written again
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD).unlink(missing_ok=True)
        measured, warm_up = draw_requests(workload)
        offset, lines = 0, []
        with (folder / BODIES).open("wb") as out:
            for number, request in enumerate((*measured, *warm_up)):
                size = out.write(build_request_body(workload, request))
                warms_up = number >= len(measured)
                lines.append(Line(ask=request, offset=offset, size=size, warm_up=warms_up))
                offset += size
        text = "".join(line.model_dump_json() + "\n" for line in lines)
        (folder / REQUESTS).write_text(text)
        # Written last: where it exists, the folder is complete.
        (folder / WORKLOAD).write_text(workload.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise BenchmarkError(f"workload {folder}: cannot be written: {error}") from error
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """Read a prepared folder; raises :class:`BenchmarkError` where it is none, or incomplete."""
    try:
        workload = Workload.model_validate_json((folder / WORKLOAD).read_text())
        text = (folder / REQUESTS).read_text()
        lines = tuple(Line.model_validate_json(line) for line in text.splitlines())
        bodies = (folder / BODIES).read_bytes()
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BenchmarkError(
            f"workload {folder}: {reason} -> create one: "
            "python -m benchmarks.load prepare --out DIR"
        ) from error
    if sum(line.size for line in lines) != len(bodies):
        raise BenchmarkError(
            f"workload {folder}: {BODIES} is incomplete -> delete the folder, prepare it again"
        )
    return Prepared(workload, lines, bodies, hashlib.sha256(bodies).hexdigest()[:16])


def build_request_body(workload: Workload, request: Request) -> bytes:
    """The JSON body of one request."""
    # Without skip_special_tokens, special tokens have no text, and their deltas would not count.
    fields: dict[str, object] = {}
    if workload.dialect == "vllm":
        fields = {"ignore_eos": True, "skip_special_tokens": False}
    urls = [_image_url(workload.data, picture) for picture in request.pictures]
    content = build_content(request.question, urls)
    return build_body(workload.model, content, tokens=workload.output_tokens, fields=fields)


@lru_cache(maxsize=64)
def _image_url(data: str, spec: PictureSpec | _OwnPicture) -> str:
    if isinstance(spec, _OwnPicture):
        return as_data_url(open_data(Path(data))[spec.item].images[spec.number]())
    return encode_picture(draw_picture(spec.seed, spec.width, spec.height), spec.format)


def draw_requests(workload: Workload) -> tuple[list[Request], list[Request]]:
    """Draw the measured requests and the warm-up requests; the two share no image.

    Raises :class:`BenchmarkError` where one's own data has too few images for that.
    """
    _require_items(workload)
    if workload.cache == "unique":
        identities: Sequence[int] = range(workload.requests)
    else:
        # Which request of the pool each one repeats, by Zipf's law.
        weights = np.arange(1, workload.pool + 1, dtype=np.float64) ** -workload.zipf
        places = _generator(workload, 4, 0).choice(
            workload.pool, size=workload.requests, p=weights / weights.sum()
        )
        identities = [int(place) for place in places]
    measured = [_draw_request(workload, *pair) for pair in enumerate(identities)]
    if workload.cache == "same-image":
        measured = [
            request.model_copy(update={"question": _find_question(workload, request.index)})
            for request in measured
        ]
    first = _count_distinct(workload) if workload.data else workload.requests
    warm_up = [
        _draw_request(workload, workload.requests + number, first + number)
        for number in range(workload.warm_up)
    ]
    return measured, warm_up


def _require_items(workload: Workload, loads: int = 1) -> None:
    """Raise :class:`BenchmarkError` where one's own data has too few items.

    Each of several loads with unique images has items of its own.
    """
    if not workload.data:
        return
    count = len(open_data(Path(workload.data)))
    unique = workload.cache == "unique"
    needed = (_count_distinct(workload) + workload.warm_up) * (loads if unique else 1)
    if count < needed:
        fix = "fewer --requests or loads, or --cache repeat" if unique else "a smaller --pool"
        raise BenchmarkError(
            f"--data {workload.data}: has {count} items, but --cache {workload.cache} needs "
            f"{needed} (with the warm-up) -> give more images, {fix}"
        )


def _count_distinct(workload: Workload) -> int:
    return workload.requests if workload.cache == "unique" else workload.pool


def _draw_request(workload: Workload, index: int, identity: int) -> Request:
    """The request of that identity, which determines its pictures and its question."""
    pictures: tuple[PictureSpec | _OwnPicture, ...]
    if workload.data:
        item = workload.first_item + identity
        images = open_data(Path(workload.data))[item].images
        pictures = tuple(_OwnPicture(item=item, number=number) for number in range(len(images)))
    else:
        generator = _generator(workload, 1, identity)
        count = _draw_from(workload.images, generator)
        pictures = tuple(
            _draw_picture(workload, generator, 1000 * identity + n) for n in range(count)
        )
    return Request(index=index, pictures=pictures, question=_find_question(workload, identity))


def _draw_picture(workload: Workload, generator: np.random.Generator, number: int) -> PictureSpec:
    side = _draw_from(workload.sides, generator)
    aspect = Fraction(_draw_from(workload.aspects, generator))
    short = round(side / max(aspect, 1 / aspect))
    width, height = (side, short) if aspect >= 1 else (short, side)
    kind = _draw_from(workload.formats, generator)
    seed = int(_generator(workload, 2, number).integers(2**31))
    return PictureSpec(seed=seed, width=width, height=height, format=kind)


def _find_question(workload: Workload, number: int) -> str:
    """The question of an item of one's own data; else one that is drawn and contains the number."""
    if workload.data:
        items = open_data(Path(workload.data))
        question = items[(workload.first_item + number) % len(items)].question
        if question is not None:
            return question
    generator = _generator(workload, 3, number)
    count = _draw_from(workload.words, generator)
    if workload.vocabulary == "numbered":
        drawn = [f"w{word}" for word in generator.integers(1000, 31_000, size=count)]
        unique = [f"w{number % 1000}", f"w{number // 1000}"]
        return " ".join([*unique, *drawn][: max(count, 2)])
    drawn = [_WORDS[place] for place in generator.integers(len(_WORDS), size=count)]
    return f"{' '.join(drawn)} {number}?".capitalize()


def _draw_from(mix: tuple[tuple[T, float], ...], generator: np.random.Generator) -> T:
    weights: NDArray[np.float64] = np.array([weight for _, weight in mix])
    return mix[int(generator.choice(len(mix), p=weights / weights.sum()))][0]


def _generator(workload: Workload, stream: int, number: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, stream, number])


@dataclass(frozen=True)
class _OwnItem:
    """Images that go together, read when they are needed, and their question, if there is one."""

    images: tuple[Callable[[], bytes], ...]
    question: str | None
    described: Sequence[object]
    """What the digest covers: names and sizes of the images, and the question."""


@lru_cache(maxsize=2)
def open_data(path: Path) -> Sequence[_OwnItem]:
    """The items at a path; raises :class:`BenchmarkError` with the fix for what cannot be read."""
    if path.is_dir() and (path / "state.json").is_file():
        items = _read_data_set(path)
    elif path.is_dir() and (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        raise BenchmarkError(f"--data {path}: has splits -> name one: {path / str(splits[0])}")
    elif path.is_dir():
        items = _read_folder(path)
    elif path.suffix == ".jsonl" and path.is_file():
        items = _read_lines(path)
    else:
        raise BenchmarkError(
            f"--data {path}: is no folder and no .jsonl file -> give a folder of images, a JSONL "
            "file, or a data set saved by datasets.save_to_disk"
        )
    if not items:
        raise BenchmarkError(
            f"--data {path}: contains no images -> put {', '.join(SUFFIXES)} files there"
        )
    return items


def as_data_url(data: bytes) -> str:
    """An image as chat clients send it; raises :class:`BenchmarkError` for another file."""
    kinds = [kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)]
    if not kinds:
        raise BenchmarkError("--data: a file is no JPEG, PNG, GIF or WebP -> convert or remove it")
    return f"data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}"


def _read_folder(path: Path) -> list[_OwnItem]:
    prompts: list[str] = []
    if (path / "prompts.txt").is_file():
        lines = (path / "prompts.txt").read_text(encoding="utf-8").splitlines()
        prompts = [line.strip() for line in lines if line.strip()]
    items = []
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    for number, file in enumerate(files):
        question = prompts[number % len(prompts)] if prompts else None
        described = [file.name, file.stat().st_size, question]
        items.append(_OwnItem((file.read_bytes,), question, described))
    return items


def _read_lines(path: Path) -> list[_OwnItem]:
    items = []
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
        question = _read_question(content)
        described = [names, [file.stat().st_size for file in files], question]
        items.append(_OwnItem(tuple(file.read_bytes for file in files), question, described))
    return items


def _read_data_set(path: Path) -> list[_OwnItem]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise BenchmarkError(
            f"--data {path}: is a Hugging Face data set -> pip install datasets"
        ) from None
    # In Arrow's format images are bytes, as they were saved; otherwise they would be decoded.
    rows = datasets.load_from_disk(str(path)).with_format("arrow")

    def read_row(number: int) -> dict[str, Any]:
        return rows[number : number + 1].to_pylist()[0]

    def read_cell(number: int, column: str, place: int) -> bytes:
        return _list_images(read_row(number)[column])[place]

    items = []
    for number in range(len(rows)):
        row = read_row(number)
        column = next((name for name, cell in row.items() if _list_images(cell)), None)
        if column is None:
            raise BenchmarkError(
                f"--data {path}: row {number} has no image, only {', '.join(row)} -> cast a column "
                "to datasets.Image"
            )
        sizes = [len(image) for image in _list_images(row[column])]
        images = tuple(partial(read_cell, number, column, place) for place in range(len(sizes)))
        question = _read_question(row)
        items.append(_OwnItem(images, question, [number, sizes, question]))
    return items


def _list_images(cell: object) -> list[bytes]:
    """The images of a cell; an image that was saved as a path is read from there."""
    images = []
    for each in cell if isinstance(cell, list) else [cell]:
        if not isinstance(each, dict) or not {"bytes", "path"} <= each.keys():
            return []
        data = each["bytes"]
        images.append(data if isinstance(data, bytes) else Path(str(each["path"])).read_bytes())
    return images


def _read_question(content: Mapping[str, object]) -> str | None:
    for name in ("question", "prompt"):
        value = content.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return None
