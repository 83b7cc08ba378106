"""Requests drawn from a workload: which pictures, which question."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.load.own_data import open_data
from benchmarks.load.workload import Workload, draw_from

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


class PictureSpec(StrictModel):
    """One picture to be drawn; its content follows from the seed."""

    seed: int
    width: int
    height: int
    format: Format


class OwnPicture(StrictModel):
    """One image of an item of one's own data."""

    item: int
    number: int


class Request(StrictModel):
    """One request; requests with equal pictures and question have identical bodies."""

    index: int
    pictures: tuple[PictureSpec | OwnPicture, ...]
    question: str


def draw_requests(workload: Workload) -> tuple[list[Request], list[Request]]:
    """Draw the measured requests and the warm-up requests; the two share no image.

    Raises :class:`BenchmarkError` where one's own data has too few images for that.
    """
    require_items(workload)
    measured = [_draw_request(workload, index) for index in range(workload.requests)]
    first = _count_distinct(workload) if workload.data else workload.requests
    warm_up = [
        _draw_by_identity(workload, workload.requests + number, first + number)
        for number in range(workload.warm_up)
    ]
    return measured, warm_up


def _draw_request(workload: Workload, index: int) -> Request:
    match workload.cache:
        case "unique":
            return _draw_by_identity(workload, index, index)
        case "repeat" | "off":
            return _draw_by_identity(workload, index, int(_draw_repeated(workload)[index]))
        case "same-image":
            shown = _draw_by_identity(workload, index, int(_draw_repeated(workload)[index]))
            return shown.model_copy(update={"question": _find_question(workload, index)})


def _draw_by_identity(workload: Workload, index: int, identity: int) -> Request:
    """The request of that identity, which determines its sizes, pictures and question."""
    if workload.data:
        return _take_own(workload, index, identity)
    generator = _generator(workload, 1, identity)
    pictures = tuple(
        _draw_picture(workload, generator, 1000 * identity + number)
        for number in range(draw_from(workload.images, generator))
    )
    return Request(index=index, pictures=pictures, question=_draw_question(workload, identity))


def require_items(workload: Workload, loads: int = 1) -> None:
    """Raise :class:`BenchmarkError` where one's own data has too few items.

    Each of several loads with unique images has items of its own.
    """
    if not workload.data:
        return
    count = len(open_data(Path(workload.data)).items)
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


def _take_own(workload: Workload, index: int, identity: int) -> Request:
    """The request of an item of one's own data, in the order of the data."""
    item = workload.first_item + identity
    images = open_data(Path(workload.data)).items[item].images
    pictures = tuple(OwnPicture(item=item, number=number) for number in range(len(images)))
    return Request(index=index, pictures=pictures, question=_find_question(workload, identity))


def _find_question(workload: Workload, number: int) -> str:
    """The question of an item of one's own data, if it has one; else one that is drawn."""
    if not workload.data:
        return _draw_question(workload, number)
    items = open_data(Path(workload.data)).items
    own = items[(workload.first_item + number) % len(items)].question
    return own if own is not None else _draw_question(workload, number)


def _draw_picture(workload: Workload, generator: np.random.Generator, number: int) -> PictureSpec:
    side, aspect = (
        draw_from(workload.sides, generator),
        Fraction(draw_from(workload.aspects, generator)),
    )
    short = round(side / max(aspect, 1 / aspect))
    width, height = (side, short) if aspect >= 1 else (short, side)
    kind = cast("Format", draw_from(workload.formats, generator))
    seed = int(_generator(workload, 2, number).integers(2**31))
    return PictureSpec(seed=seed, width=width, height=height, format=kind)


def _draw_question(workload: Workload, number: int) -> str:
    """A question that contains the number, so that no two are equal."""
    generator = _generator(workload, 3, number)
    count = draw_from(workload.words, generator)
    if workload.vocabulary == "numbered":
        drawn = [f"w{word}" for word in generator.integers(1000, 31_000, size=count)]
        unique = [f"w{number % 1000}", f"w{number // 1000}"]
        return " ".join([*unique, *drawn][: max(count, 2)])
    drawn = [_WORDS[place] for place in generator.integers(len(_WORDS), size=count)]
    return f"{' '.join(drawn)} {number}?".capitalize()


def _generator(workload: Workload, stream: int, number: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, stream, number])


@lru_cache(maxsize=8)
def _draw_repeated(workload: Workload) -> NDArray[np.int64]:
    """Which identity of the pool each request repeats, (requests,)."""
    weights = np.arange(1, workload.pool + 1, dtype=np.float64) ** -workload.zipf
    generator = _generator(workload, 4, 0)
    return generator.choice(workload.pool, size=workload.requests, p=weights / weights.sum())
