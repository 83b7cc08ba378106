"""Requests drawn from a workload, in words and numbers: which images, which question.

Knows nothing about pixels or bytes.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.load.mix import pick
from benchmarks.load.plain import Plain
from benchmarks.load.workload import Workload

Format = Literal["jpeg", "png"]

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


class Picture(Plain):
    """One image to be drawn: the seed says what is in it."""

    seed: int
    width: int
    height: int
    format: Format


class Ask(Plain):
    """One request; two with the same pictures and the same question are the same bytes."""

    index: int
    pictures: tuple[Picture, ...]
    question: str


def asks(workload: Workload) -> tuple[list[Ask], list[Ask]]:
    """Measured requests and, apart from them, those for the warm-up, on other images."""
    measured = [_ask(workload, index) for index in range(workload.requests)]
    first = workload.requests
    warm_up = [
        _fresh(workload, first + number, first + number) for number in range(workload.warm_up)
    ]
    return measured, warm_up


def _ask(workload: Workload, index: int) -> Ask:
    match workload.cache:
        case "unique":
            return _fresh(workload, index, index)
        case "repeat" | "off":
            return _fresh(workload, index, int(_again(workload)[index]))
        case "same-image":
            shown = _fresh(workload, index, int(_again(workload)[index]))
            return shown.model_copy(update={"question": _question(workload, index)})


def _fresh(workload: Workload, index: int, identity: int) -> Ask:
    """The request that ``identity`` stands for; sizes and all else follow from it alone."""
    generator = _generator(workload, 1, identity)
    pictures = tuple(
        _picture(workload, generator, 1000 * identity + number)
        for number in range(pick(workload.images, generator))
    )
    return Ask(index=index, pictures=pictures, question=_question(workload, identity))


def _picture(workload: Workload, generator: np.random.Generator, number: int) -> Picture:
    side, aspect = pick(workload.sides, generator), Fraction(pick(workload.aspects, generator))
    short = round(side / max(aspect, 1 / aspect))
    width, height = (side, short) if aspect >= 1 else (short, side)
    kind = cast("Format", pick(workload.formats, generator))
    seed = int(_generator(workload, 2, number).integers(2**31))
    return Picture(seed=seed, width=width, height=height, format=kind)


def _question(workload: Workload, number: int) -> str:
    """Never the same for two numbers: the number itself is spelt at the end."""
    generator = _generator(workload, 3, number)
    count = pick(workload.words, generator)
    if workload.vocabulary == "numbered":
        drawn = [f"w{word}" for word in generator.integers(1000, 31_000, size=count)]
        tail = [f"w{number % 1000}", f"w{number // 1000}"]
        return " ".join([*tail, *drawn][: max(count, 2)])
    drawn = [_WORDS[place] for place in generator.integers(len(_WORDS), size=count)]
    return f"{' '.join(drawn)} {number}?".capitalize()


def _generator(workload: Workload, stream: int, number: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, stream, number])


@lru_cache(maxsize=8)
def _again(workload: Workload) -> NDArray[np.int64]:
    """Which of the pool each request asks for, (requests,)."""
    weights = np.arange(1, workload.pool + 1, dtype=np.float64) ** -workload.zipf
    generator = _generator(workload, 4, 0)
    return generator.choice(workload.pool, size=workload.requests, p=weights / weights.sum())
