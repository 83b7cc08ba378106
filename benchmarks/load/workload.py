"""Requests of a workload: drawn by seed or from own data, and encoded before any clock runs.

A folder has ``workload.json`` and ``bodies.jsonl``, one request body a line: those that are
measured, then those of the warm-up. All servers that are compared are sent the same folder.

Own images come from a folder, in order of their names, or from a JSONL file with one object a line:
``image`` (a path relative to the file, or base64) and, where it is not to be drawn, ``question``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from benchmarks import BenchmarkError
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.load.settings import RequestOptions, Workload
from vllm_autoprune.errors import Problem
from vllm_autoprune.evaluation.questions import Text, read_objects, read_picture, refuse

_T = TypeVar("_T")

_WORKLOAD, _BODIES = "workload.json", "bodies.jsonl"
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif")
"""Of the names of files that are sent from a folder."""
_ASPECTS = {"4/3": 4, "3/4": 2, "1/1": 2, "16/9": 1}
"""Width over height, with weights."""
_FORMATS: Mapping[Literal["jpeg", "png"], float] = {"jpeg": 4, "png": 1}
_LENGTHS = {8: 2, 16: 2, 32: 1}
"""Words in a question, with weights."""
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


class _Picture(NamedTuple):
    """One picture to be drawn; its content follows from the seed."""

    seed: int
    width: int
    height: int
    format: Literal["jpeg", "png"]


class _File(NamedTuple):
    """One picture of one's own data, as ``read_picture`` takes it."""

    where: str
    folder: Path
    text: str


class _Request(NamedTuple):
    """One request; requests with equal pictures and question have identical bodies."""

    pictures: tuple[_Picture | _File, ...]
    question: str


class Prepared(NamedTuple):
    """A workload in memory: bodies of the requests, by their index, and of the warm-up."""

    workload: Workload
    measured: Sequence[bytes]
    warm_up: Sequence[bytes]
    digest: str


def make_workload(options: RequestOptions, model: str, loads: int = 1) -> Workload:
    """The workload of these options; raises :class:`BenchmarkError` for too few data.

    Each of several ``loads`` with unique images has items of its own.
    """
    workload = Workload(model=model, **options.model_dump(include=set(RequestOptions.model_fields)))
    if workload.data:
        count = len(_open_data(workload.data))
        needed = _count_distinct(workload) + workload.warm_up
        needed *= loads if workload.cache == "unique" else 1
        if count < needed:
            raise BenchmarkError(
                f"--data {workload.data}: has {count} items, but --cache {workload.cache} needs "
                f"{needed} (with the warm-up) -> give more images, or send fewer requests"
            )
    return workload


def prepare(workload: Workload, folder: Path) -> Prepared:
    """Draw and encode all requests into a folder."""
    # Without skip_special_tokens, special tokens have no text, and their deltas would not count.
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _WORKLOAD).unlink(missing_ok=True)
        with (folder / _BODIES).open("wb") as file:
            for pictures, question in _draw_requests(workload):
                body = build_body(
                    workload.model,
                    build_content(question, map(_encode, pictures)),
                    tokens=workload.output_tokens,
                    fields=fields if workload.dialect == "vllm" else {},
                )
                file.write(body + b"\n")
        # Written last: where it exists, the folder is complete.
        (folder / _WORKLOAD).write_text(workload.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise BenchmarkError(f"workload {folder}: {error}") from error
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """Read a prepared folder; raises :class:`BenchmarkError` where it is none, or incomplete."""
    try:
        workload = Workload.model_validate_json((folder / _WORKLOAD).read_bytes())
        content = (folder / _BODIES).read_bytes()
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BenchmarkError(
            f"workload {folder}: {reason} -> create one: "
            "python -m benchmarks.load prepare --out DIR"
        ) from error
    bodies, count = content.split(b"\n")[:-1], workload.requests
    if len(bodies) != count + workload.warm_up or not content.endswith(b"\n"):
        raise BenchmarkError(
            f"workload {folder}: {_BODIES} is incomplete -> delete the folder, prepare it again"
        )
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Prepared(workload, bodies[:count], bodies[count:], digest)


@lru_cache(maxsize=64)
def _encode(picture: _Picture | _File) -> str:
    """An image as a data URL, as chat clients send it."""
    if isinstance(picture, _Picture):
        image = draw_picture(picture.seed, picture.width, picture.height)
        return encode_picture(image, picture.format)
    return read_picture(*picture).url


def _draw_requests(workload: Workload) -> list[_Request]:
    """Draw the measured requests, then those of the warm-up, which share no image with them."""
    if workload.cache == "unique":
        identities = list(range(workload.requests))
    else:
        # Which request of the pool each one repeats, by Zipf's law.
        weights = np.arange(1, workload.pool + 1, dtype=np.float64) ** -workload.zipf
        places = _generator(workload, 4, 0).choice(
            workload.pool, size=workload.requests, p=weights / weights.sum()
        )
        identities = [int(place) for place in places]
    drawn = [
        # A repeated image is asked about by the place of the request.
        _draw_request(workload, identity, index if workload.cache == "same-image" else identity)
        for index, identity in enumerate(identities)
    ]
    behind = _count_distinct(workload) if workload.data else workload.requests
    warm_up = range(behind, behind + workload.warm_up)
    return drawn + [_draw_request(workload, number, number) for number in warm_up]


def _count_distinct(workload: Workload) -> int:
    return workload.requests if workload.cache == "unique" else workload.pool


def _draw_request(workload: Workload, identity: int, asked: int) -> _Request:
    """The request whose pictures follow from ``identity``, and its question from ``asked``."""
    if workload.data:
        items = _open_data(workload.data)
        question = items[(workload.first_item + asked) % len(items)].question
        pictures = items[workload.first_item + identity].pictures
        return _Request(pictures, question or _draw_question(workload, asked))
    generator = _generator(workload, 1, identity)
    drawn = []
    for number in range(_draw_from(workload.images, generator)):
        side = _draw_from(workload.sides, generator)
        aspect = Fraction(_draw_from(_ASPECTS, generator))
        short = round(side / max(aspect, 1 / aspect))
        width, height = (side, short) if aspect >= 1 else (short, side)
        kind = _draw_from(_FORMATS, generator)
        seed = int(_generator(workload, 2, 1000 * identity + number).integers(2**31))
        drawn.append(_Picture(seed, width, height, kind))
    return _Request(tuple(drawn), _draw_question(workload, asked))


def _draw_question(workload: Workload, number: int) -> str:
    """Words, and the number, so that no two questions are equal."""
    generator = _generator(workload, 3, number)
    count = _draw_from(_LENGTHS, generator)
    if workload.vocabulary == "numbered":
        words = [f"w{word}" for word in generator.integers(1000, 31_000, size=count)]
        return " ".join([f"w{number % 1000}", f"w{number // 1000}", *words][:count])
    words = [_WORDS[place] for place in generator.integers(len(_WORDS), size=count)]
    return f"{' '.join(words)} {number}?".capitalize()


def _draw_from(mix: Mapping[_T, float], generator: np.random.Generator) -> _T:
    weights = np.array(list(mix.values()))
    return list(mix)[int(generator.choice(len(mix), p=weights / weights.sum()))]


def _generator(workload: Workload, stream: int, number: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, stream, number])


class _Line(BaseModel):
    """One line of one's own data; what else it has is not read."""

    image: Text
    question: str = ""


_LINE = TypeAdapter(_Line)


@lru_cache(maxsize=2)
def _open_data(data: str) -> Sequence[_Request]:
    """The items at a path, whose question may be empty; ConfigError for what is no data."""
    path, items, problems = Path(data), list[_Request](), list[Problem]()
    fix = f"give a folder of {', '.join(_ENDINGS)} files, or a .jsonl file"
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _ENDINGS)
        items = [_Request((_File(str(path / name), path, name),), "") for name in names]
    else:
        form = 'give an object with a path as "image"'
        for number, line in read_objects(path, _LINE, problems, fix, form):
            where = f"{path}:{number}: image {line.image[:80]!r}"
            items.append(_Request((_File(where, path.parent, line.image),), line.question))
    if not items and not problems:
        problems.append(Problem(str(path), "has no images", fix))
    refuse("--data", problems)
    return items
