"""Requests of a workload: drawn by seed or one's own, and encoded before the measurement starts.

A folder has ``workload.json`` and ``bodies.jsonl``. The latter has one request body a line, the
measured requests first, then those of the warm-up. All servers of a comparison are sent the same
folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from benchmarks import BenchmarkError
from benchmarks.common.requests import (
    build_chat,
    build_content,
    draw_picture,
    encode_picture,
)
from benchmarks.load.settings import Workload

_T = TypeVar("_T")

_WORKLOAD = "workload.json"
_BODIES = "bodies.jsonl"
_ASPECTS = {"4/3": 4, "3/4": 2, "1/1": 2, "16/9": 1}
"""Aspect ratios, width over height, with their weights."""
_FORMATS: Mapping[Literal["jpeg", "png"], float] = {"jpeg": 4, "png": 1}
_LENGTHS = {8: 2, 16: 2, 32: 1}
"""Numbers of words in a question, with their weights."""
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


class _Request(NamedTuple):
    """One request; requests with equal pictures and question have identical bodies."""

    pictures: tuple[_Picture, ...]
    question: str


class Prepared(NamedTuple):
    """A workload in memory: request bodies by index, and the bodies of the warm-up."""

    workload: Workload
    measured: Sequence[bytes]
    warm_up: Sequence[bytes]
    digest: str

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """Read a folder; raises :class:`BenchmarkError` if its preparation has not finished."""
        try:
            workload = Workload.model_validate_json((folder / _WORKLOAD).read_bytes())
            content = (folder / _BODIES).read_bytes()
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise BenchmarkError.of(
                f"workload {folder}",
                reason,
                "create one: python -m benchmarks.load prepare --out DIR",
            ) from error
        bodies = content.splitlines()
        count = workload.requests
        digest = hashlib.sha256(content).hexdigest()[:16]
        return cls(workload, bodies[:count], bodies[count:], digest)


def prepare(workload: Workload, folder: Path) -> Prepared:
    """Draw requests or choose one's own, encode them, and write them to a folder."""
    # Special tokens have no text unless skip_special_tokens is false; their deltas would not count.
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    encode = _encode_drawn if workload.data is None else _encode_own
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _WORKLOAD).unlink(missing_ok=True)
        with (folder / _BODIES).open("wb") as file:
            for messages in encode(workload):
                body = build_chat(
                    workload.model,
                    messages,
                    tokens=workload.output_tokens,
                    fields=fields if workload.dialect == "vllm" else {},
                )
                file.write(body + b"\n")
        # This file is written last: a folder that has it is complete.
        (folder / _WORKLOAD).write_text(workload.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise BenchmarkError.of(f"workload {folder}", str(error)) from error
    return Prepared.read(folder)


def _encode_drawn(workload: Workload) -> Iterator[Sequence[Mapping[str, object]]]:
    """Yield the messages of each drawn request."""

    @lru_cache(maxsize=64)
    def encode(picture: _Picture) -> str:
        image = draw_picture(picture.seed, picture.width, picture.height)
        return encode_picture(image, picture.format)

    for pictures, question in _draw_requests(workload):
        content = build_content(question, map(encode, pictures))
        yield [{"role": "user", "content": content}]


def _encode_own(workload: Workload) -> Iterator[Sequence[Mapping[str, object]]]:
    """Yield the messages of each of one's own questions, those of the warm-up last."""
    # Reads data by packages that the image of the Kubernetes job lacks.
    from benchmarks.load.own_data import choose_questions

    assert workload.data is not None
    pool = workload.requests if workload.cache == "unique" else workload.pool
    questions = choose_questions(
        workload.data, pool + workload.warm_up, workload.part, workload.cache
    )
    for identity in _choose_identities(workload):
        yield questions[identity].messages()
    for question in questions[pool:]:
        yield question.messages()


def _draw_requests(workload: Workload) -> list[_Request]:
    """Draw the measured requests, then those of the warm-up; the two share no image."""
    drawn = [
        # With "same-image" the image comes from the pool, and the question from the request's
        # index.
        _draw_request(
            workload, identity, index if workload.cache == "same-image" else identity
        )
        for index, identity in enumerate(_choose_identities(workload))
    ]
    warm_up = range(workload.requests, workload.requests + workload.warm_up)
    return drawn + [_draw_request(workload, number, number) for number in warm_up]


def _choose_identities(workload: Workload) -> list[int]:
    """The identity of each measured request, by which its images are drawn or chosen.

    Requests about the same images have the same identity, a number below the size of the pool,
    drawn by Zipf's law. With the cache ``unique`` all identities differ.
    """
    if workload.cache == "unique":
        return list(range(workload.requests))
    weights = np.arange(1, workload.pool + 1, dtype=np.float64) ** -workload.zipf
    ranks = _generator(workload, 4, 0).choice(
        workload.pool, size=workload.requests, p=weights / weights.sum()
    )
    return [int(rank) for rank in ranks]


def _draw_request(workload: Workload, identity: int, question_number: int) -> _Request:
    """Draw a request: its pictures by ``identity``, its question by ``question_number``."""
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
    # The question's number is added to its words, so that no two questions are equal.
    generator = _generator(workload, 3, question_number)
    count = _draw_from(_LENGTHS, generator)
    if workload.vocabulary == "numbered":
        words = [f"w{word}" for word in generator.integers(1000, 31_000, size=count)]
        question = " ".join(
            [f"w{question_number % 1000}", f"w{question_number // 1000}", *words][
                :count
            ]
        )
    else:
        words = [_WORDS[index] for index in generator.integers(len(_WORDS), size=count)]
        question = f"{' '.join(words)} {question_number}?".capitalize()
    return _Request(tuple(drawn), question)


def _draw_from(mix: Mapping[_T, float], generator: np.random.Generator) -> _T:
    """Draw one of the values of a mix in proportion to their weights."""
    weights = np.array(list(mix.values()))
    return list(mix)[int(generator.choice(len(mix), p=weights / weights.sum()))]


def _generator(workload: Workload, stream: int, number: int) -> np.random.Generator:
    """Random generator of request ``number``; streams of a workload share no numbers."""
    return np.random.default_rng([workload.seed, stream, number])
