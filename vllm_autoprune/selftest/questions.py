"""Pictures and questions of the self-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from PIL import Image

from vllm_autoprune.selftest.checks import SMALL_BUDGET
from vllm_autoprune.selftest.part_checks import SPLIT_QUESTION


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A picture of coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


_WIDE, _TALL = picture(200, 112, 1), picture(96, 208, 2)
QUESTIONS: Mapping[str, tuple[str, tuple[Image.Image, ...]]] = {
    "square": ("what colour is the cat", (picture(112, 112, 0),)),
    "wide": ("what colour is the cat", (_WIDE,)),
    "high": ("what colour is the cat", (_TALL,)),
    "large": ("what colour is the cat", (picture(330, 300, 4),)),
    "two": ("how many are there", (_TALL, picture(120, 96, 3))),
    "other question": ("which dog is on the left", (_WIDE,)),
}
QUESTIONS_WITH_BUDGETS: Mapping[str, tuple[str, tuple[Image.Image, ...], Sequence[int]]] = {
    "two at once": (*QUESTIONS["two"], (SMALL_BUDGET, SMALL_BUDGET)),
    "one pruned, one whole": (
        QUESTIONS["two"][0],
        (picture(96, 96, 5), _WIDE),
        (SMALL_BUDGET, 4096),
    ),
    "first": (*QUESTIONS["high"], (SMALL_BUDGET,)),
    "second": (*QUESTIONS["wide"], (SMALL_BUDGET,)),
}
"""Requests whose images all have the same `uuid`; each image has a budget."""
SECOND = ("which dog is on the left", QUESTIONS[SPLIT_QUESTION][1])
"""Another question about the same image."""

FURTHER = ("how many are there", QUESTIONS[SPLIT_QUESTION][1])
"""A third question about it."""

PADDING = " and the sky is blue on the right" * 6
"""Added to every question, so that image and text fill a block of the prefix cache."""
