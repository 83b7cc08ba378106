"""The workload of a load test: a description that determines every request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, Field

from benchmarks.common import StrictModel

T = TypeVar("T")


def _check_mix(mix: tuple[tuple[T, float], ...]) -> tuple[tuple[T, float], ...]:
    if not mix or any(not (math.isfinite(weight) and weight > 0) for _, weight in mix):
        raise ValueError("a mix needs at least one value, and weights above 0")
    return mix


WholeMix = Annotated[tuple[tuple[int, float], ...], AfterValidator(_check_mix)]
"""Whole numbers with their weights, such as ``((480, 1.0), (640, 2.0))``."""

TextMix = Annotated[tuple[tuple[str, float], ...], AfterValidator(_check_mix)]
"""Words with their weights, such as ``(("4/3", 2.0), ("1/1", 1.0))``."""

Cache = Literal["unique", "repeat", "same-image", "off"]

CACHES: dict[Cache, str] = {
    "unique": "every image is new, so that no cache helps",
    "repeat": "whole requests are repeated, by Zipf's law",
    "same-image": "images are repeated by Zipf's law, each time with a new question",
    "off": "as repeat, but the server's caches are switched off",
}
"""States of the server's caches: a factor of the experiment."""


class Workload(StrictModel):
    """All settings of the requests; equal workloads give the same bytes on every machine."""

    model: str
    """Name of the served model."""
    requests: int = Field(default=200, ge=1)
    """Measured requests."""
    warm_up: int = Field(default=8, ge=0)
    """Requests sent before the clock starts, on images that are not measured."""
    output_tokens: int = Field(default=16, ge=1)
    """Length of every answer; fixed, so that a shorter answer is never a faster one."""
    cache: Cache = "unique"
    pool: int = Field(default=20, ge=1)
    """How many different images (or requests) are repeated, where they are."""
    zipf: float = Field(default=1.1, gt=0)
    """Exponent of Zipf's law: the k-th image is asked for in proportion to k ** -zipf."""
    sides: WholeMix = ((480, 1.0), (640, 2.0), (1024, 1.0))
    """Longer side of an image, pixels."""
    aspects: TextMix = (("4/3", 4.0), ("3/4", 2.0), ("1/1", 2.0), ("16/9", 1.0))
    """Width over height."""
    images: WholeMix = ((1, 1.0),)
    """Images in one request."""
    formats: TextMix = (("jpeg", 4.0), ("png", 1.0))
    words: WholeMix = ((8, 2.0), (16, 2.0), (32, 1.0))
    """Words in a question."""
    vocabulary: Literal["english", "numbered"] = "english"
    """``numbered``: the words w1, w2, ..., one token each for a model without weights."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """``openai`` leaves out vLLM's own fields; answers may then be shorter than requested."""
    seed: int = 0
    data: str = ""
    """Folder, JSONL file or data set with images and questions of one's own; empty: drawn ones."""
    data_digest: str = ""
    first_item: int = 0
    """The first item of the data that is used: the loads of an experiment share none."""


def draw_from(mix: tuple[tuple[T, float], ...], generator: np.random.Generator) -> T:
    """One value, drawn by weight."""
    weights = np.array([weight for _, weight in mix])
    return mix[int(generator.choice(len(mix), p=weights / weights.sum()))][0]


def parse_mix(text: str, convert: Callable[[str], T]) -> tuple[tuple[T, float], ...]:
    """A mix as the command line writes it: ``480=1,640=2``; a weight that is left out is 1."""
    mix = []
    for part in text.split(","):
        value, _, weight = part.partition("=")
        mix.append((convert(value.strip()), float(weight or 1)))
    return tuple(mix)


def format_mix(mix: tuple[tuple[T, float], ...]) -> str:
    """The mix as the command line writes it."""
    return ",".join(f"{value}={weight:g}" for value, weight in mix)


def describe_mix(mix: tuple[tuple[T, float], ...]) -> str:
    """The mix in words: each value with its share."""
    if len(mix) == 1:
        return f"{mix[0][0]}"
    total = sum(weight for _, weight in mix)
    return ", ".join(f"{value} ({100 * weight / total:.0f} %)" for value, weight in mix)
