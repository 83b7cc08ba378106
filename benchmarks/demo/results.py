"""Results of the demo: one row for each configuration, with its uncertainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.common.shapes import KvLayout
from benchmarks.demo.chat_client import Answer
from benchmarks.demo.configurations import FULL, Configuration, Keep
from benchmarks.demo.speed import Speed
from benchmarks.minillava.split import Example, grade_answers

_Z = 1.96


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. Shares lie between 0 and 1; tokens and bytes are means over questions."""

    configuration: Configuration
    accuracy: float
    half_width: float
    accuracy_plus: float
    by_kind: Mapping[str, float]
    prompt_tokens: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Control:
    """Comparison of the pruned server keeping every token with the stock server."""

    same_answers: int
    asked: int


@dataclass(frozen=True, slots=True)
class Results:
    """All results of the demo."""

    rows: tuple[Row, ...]
    control: Control
    questions: int
    scenes: int
    visual_tokens: int
    kv_formula: str
    dtype: str
    environment: Mapping[str, str]
    speed: Speed
    seconds: float = 0.0

    def row(self, keep: Keep, budget: int | None = None) -> Row:
        """The row of one configuration."""
        wanted = Configuration(keep, budget)
        return next(row for row in self.rows if row.configuration == wanted)

    @property
    def full(self) -> Row:
        """The row of the stock server."""
        return self.row(FULL.keep)

    def verdict(self, budget: int = 8) -> str:
        """The result at one budget, in a sentence."""
        parts = [
            f"{name} {100 * self.row(keep, budget).accuracy:.1f} %" for name, keep in _KEEPS.items()
        ]
        full = self.full
        fewer = full.prompt_tokens / self.row("state", budget).prompt_tokens
        return (
            f"At K = {budget} of {self.visual_tokens} visual tokens: {', '.join(parts)} "
            f"(full: {100 * full.accuracy:.1f} %), with {fewer:.1f} times fewer prompt tokens "
            "and KV bytes."
        )

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "verdict": self.verdict()}


_KEEPS: Mapping[str, Keep] = {
    "base policy": "reference",
    "shipped state": "state",
    "resize control": "resized",
    "random keep": "random",
}


def half_width(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Half of the 95 % interval of accuracy: the wider of two intervals.

    Wilson's takes questions as independent, and is correct near 0 and 1. The other one takes scenes
    as independent, because questions on one image are correlated.
    """
    p, n = grade_answers(examples, answers).accuracy, len(examples)
    wilson = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    members: dict[int, list[int]] = {}
    for i, example in enumerate(examples):
        members.setdefault(example.image_id, []).append(i)
    if len(members) < 2:
        return wilson
    by_scene = [
        grade_answers([examples[i] for i in own], [answers[i] for i in own]).accuracy
        for own in members.values()
    ]
    clustered = _Z * statistics.stdev(by_scene) / math.sqrt(len(by_scene))
    return max(wilson, clustered)


def build_row(
    configuration: Configuration,
    examples: Sequence[Example],
    answers: Sequence[Answer],
    layout: KvLayout,
) -> Row:
    """Scores and cost of one configuration."""
    texts = [answer.text for answer in answers]
    scored = grade_answers(examples, texts)
    tokens = statistics.fmean(answer.prompt_tokens for answer in answers)
    return Row(
        configuration=configuration,
        accuracy=scored.accuracy,
        half_width=half_width(examples, texts),
        accuracy_plus=scored.accuracy_plus,
        by_kind=scored.by_kind,
        prompt_tokens=tokens,
        kv_bytes=tokens * layout.bytes_per_token,
    )


def build_control(stock: Sequence[Answer], kept: Sequence[Answer]) -> Control:
    """Compare both servers on the same questions in the same order, with all tokens kept."""
    same = sum(a == b for a, b in zip(stock, kept, strict=True))
    return Control(same_answers=same, asked=len(stock))
