"""What is asked in a load test: a description from which every request follows.

Knows nothing about when requests are sent, nor about servers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from benchmarks.load.mix import TextMix, WholeMix
from benchmarks.load.plain import Plain

Cache = Literal["unique", "repeat", "same-image", "off"]

CACHES: dict[Cache, str] = {
    "unique": "every image is new: no cache can answer",
    "repeat": "whole requests come again, by Zipf's law",
    "same-image": "images come again by Zipf's law, each time with a new question",
    "off": "as repeat, but the server's caches are switched off",
}
"""The state of the server's caches is a factor of the experiment, never an accident."""


class Workload(Plain):
    """All settings of the requests; two equal workloads give the same bytes on every machine."""

    model: str
    """Name that requests ask for."""
    requests: int = Field(default=200, ge=1)
    """Measured requests."""
    warm_up: int = Field(default=8, ge=0)
    """Requests sent before the clock starts, on images that are not measured."""
    output_tokens: int = Field(default=16, ge=1)
    """Length of every answer; fixed, so that a shorter answer is never a faster one."""
    cache: Cache = "unique"
    pool: int = Field(default=20, ge=1)
    """How many different images (or requests) come again, where they do."""
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
    """``numbered`` is w1, w2, ...: one token a word in a model folder without a real tokenizer."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """``openai`` leaves out vLLM's own fields; answers may then be shorter than asked for."""
    seed: int = 0
