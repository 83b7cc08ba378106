"""Settings and request bodies of the overhead measurements; no two bodies share a cache entry."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.common.client import build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture

STATE = "autoprune"
BUDGET, QUESTION = 64, 24
"""K, and words in a question, each of which is one token."""


@dataclass(frozen=True)
class Settings:
    """Which models are served, how much is measured, and where files go."""

    model: Path
    text_tower: Path
    layers: int
    quick: bool
    out: Path

    def log(self, name: str) -> Path:
        """The file of a server's output."""
        self.out.mkdir(parents=True, exist_ok=True)
        return self.out / f"{name}.log"


@lru_cache(maxsize=64)
def image_url(seed: int, width: int = 640, height: int = 480) -> str:
    """A picture as a PNG data URL, as chat clients send it."""
    return encode_picture(draw_picture(seed, width, height))


def draw_words(count: int, number: int, vocabulary: int = 31_000) -> str:
    """``count`` words of one token each in a true-width shape's vocabulary; unique by number."""
    generator = random.Random(number)
    head = [number % 1000, number // 1000]  # unique from the start, so that no prefix is shared
    tail = [generator.randrange(1000, vocabulary) for _ in range(count - len(head))]
    return " ".join(f"w{i}" for i in (*head, *tail))


def build_request(
    model: str,
    text: str,
    url: str | None = None,
    tokens: int = 1,
    budget: int | None = None,
    pruning: Mapping[str, object] | None = None,
) -> bytes:
    """A streamed greedy request for exactly ``tokens`` tokens.

    ``pruning``: its fields for the plugin, beside ``budget``.
    """
    fields: dict[str, object] = {"ignore_eos": True}
    # Otherwise a special first token has no text to be timed.
    fields["skip_special_tokens"] = False
    own = {**(pruning or {}), **({} if budget is None else {"budget": budget})}
    if own:
        fields["mm_processor_kwargs"] = {"autoprune": own}
    content = build_content(text, [] if url is None else [url])
    return build_body(model, content, tokens=tokens, fields=fields)
