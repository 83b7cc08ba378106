"""What was measured, as records: one row a configuration, with how sure each figure is.

Knows nothing about servers, tables or files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.demo.ask import Answer, Timing, texts
from benchmarks.demo.configurations import FULL, Configuration, Keep
from benchmarks.demo.cost import KvLayout
from benchmarks.minillava.split import Example, scores

_Z = 1.96


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a sample, in milliseconds."""

    median: float
    low: float
    high: float
    count: int


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
    ttft: Spread
    total: Spread


@dataclass(frozen=True, slots=True)
class Control:
    """The pruned server told to keep every token, beside the stock server."""

    same_answers: int
    asked: int
    ttft: Spread
    total: Spread


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that the demo tells."""

    rows: tuple[Row, ...]
    control: Control
    questions: int
    scenes: int
    visual_tokens: int
    kv_formula: str
    environment: Mapping[str, str]
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
        """The claim that this project makes about its small model, with the figures measured."""
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

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "verdict": self.verdict()}


_KEEPS: Mapping[str, Keep] = {
    "base policy": "reference",
    "shipped state": "state",
    "random keep": "random",
}


def spread(seconds: Sequence[float]) -> Spread:
    """Median and quartiles of times, in milliseconds."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(1000 * median, 1000 * low, 1000 * high, len(seconds))


def half_width(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Half of the 95 % interval of accuracy: the wider of two.

    Wilson's, which takes questions for independent and holds near 0 and 1; and one that takes
    each scene for one draw, since questions on one image share its fate.
    """
    p, n = scores(examples, answers).accuracy, len(examples)
    wilson = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    members: dict[int, list[int]] = {}
    for i, example in enumerate(examples):
        members.setdefault(example.image_id, []).append(i)
    if len(members) < 2:
        return wilson
    by_scene = [
        scores([examples[i] for i in held], [answers[i] for i in held]).accuracy
        for held in members.values()
    ]
    clustered = _Z * statistics.stdev(by_scene) / math.sqrt(len(by_scene))
    return max(wilson, clustered)


def row(
    configuration: Configuration,
    examples: Sequence[Example],
    answers: Sequence[Answer],
    timings: Sequence[Timing],
    layout: KvLayout,
) -> Row:
    """Scores, cost and times of one configuration."""
    said = texts(answers)
    found = scores(examples, said)
    tokens = statistics.fmean(answer.prompt_tokens for answer in answers)
    return Row(
        configuration=configuration,
        accuracy=found.accuracy,
        half_width=half_width(examples, said),
        accuracy_plus=found.accuracy_plus,
        by_kind=found.by_kind,
        prompt_tokens=tokens,
        kv_bytes=tokens * layout.bytes_per_token,
        ttft=spread([timing.ttft for timing in timings]),
        total=spread([timing.total for timing in timings]),
    )


def control(stock: Sequence[Timing], kept: Sequence[Timing]) -> Control:
    """The same questions in the same order on both servers, all tokens kept on both."""
    same = sum(a.answer == b.answer for a, b in zip(stock, kept, strict=True))
    return Control(
        same_answers=same,
        asked=len(stock),
        ttft=spread([timing.ttft for timing in kept]),
        total=spread([timing.total for timing in kept]),
    )
