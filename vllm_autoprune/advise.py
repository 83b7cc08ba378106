"""Advice on a traffic: what each way to serve it costs, whether pruning helps, which state pays.

The cost model gives the time to first token of the first and of another question on an image;
docs/choosing.md has its formulas. Symbols: N visual tokens of an image, K kept ones, K_c of them
core; T text tokens before the image, U behind it, A of the answer; b tokens of a KV block.
:data:`ASSUMPTIONS` lists what is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from vllm_autoprune.flags import refuse_value
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate

Way = Literal["stock", "question-reading", "split", "question-free", "resized"]
WAYS: tuple[Way, ...] = get_args(Way)
_PRUNED: tuple[Way, ...] = ("question-reading", "split", "question-free")

_CORE_SHARE = 0.75
"""Share of K that is core, unless --core or a state says it."""

WORTHWHILE = 1.05
"""Minimum gain in total time that counts as help; smaller ones are within the error of the
estimate."""

ASSUMPTIONS = (
    "One image a prompt, and its question behind it.",
    "Seconds of one request on an otherwise idle server. The sum over an image's questions is how "
    "long the server is busy with them; batching makes all of it shorter, not in equal parts.",
    "Prefill is linear in the tokens that are computed: a fixed time per request, and p for each "
    "token. Attention to the cached tokens of an image and the square term of attention are left "
    "out, which favours stock.",
    "Between two questions on an image nothing is evicted: vLLM's prefix, encoder and processor "
    "caches and the feature cache hold what the first question left there.",
    "The first question finds the template in the prefix cache, another question also what its way "
    "of serving shares, in whole KV blocks.",
    "Decoding an image happens for every question; the image processor runs once an image.",
    "A split selects twice for the first question and once for another.",
    "Decoded tokens take the same time in all ways to serve, which favours stock.",
    "Resized: the image is made so small that it has K tokens; tower time falls with the tokens.",
)

_IMAGE = "prefill of the image"
_REMEDIES: Mapping[str, str] = {
    "front end": "have clients send smaller images, or raise --api-server-count",
    "vision tower": "make images smaller (max_pixels of the image processor), or encode them in "
    "larger batches",
    "selection": "choose a state that selects faster (docs/states.md, What a state costs)",
    "request": "serve more requests at once: a step costs this much however few tokens it has",
    _IMAGE: "keep fewer tokens: a smaller --budget",
    "prefill of text": "shorten the text, or put what all requests have in common before the image",
    "decoding": "answer shorter, decode in larger batches, or use speculative decoding",
}
"""What shortens each part of a request; all parts but decoding belong to the time to first
token."""


class Traffic(FrozenModel):
    """Sizes of the requests on one image; see the module for the symbols."""

    questions: float = Field(
        ge=1, title="Q", description="mean number of questions on one image"
    )
    tokens: int = Field(ge=1, title="N", description="visual tokens of an image")
    budget: int = Field(
        ge=1, title="K", description="kept tokens, as 64 or as 1/8 (default: N / 9)"
    )
    core: int = Field(
        ge=0, title="K_c", description="core tokens of a split (default: 3/4 of K)"
    )
    template: int = Field(
        default=0, ge=0, title="T", description="text tokens before the image"
    )
    prompt: int = Field(
        default=32, ge=1, title="U", description="text tokens behind the image"
    )
    answer: int = Field(default=64, ge=1, title="A", description="answer tokens")
    block: int = Field(
        default=16,
        ge=0,
        title="b",
        description="tokens of a KV block; 0: no prefix cache",
    )

    @field_validator("budget", "core")
    @classmethod
    def _check_part(cls, value: int, info: ValidationInfo) -> int:
        name = "tokens" if info.field_name == "budget" else "budget"
        if value > info.data.get(name, math.inf):
            fix = f"give at most the value of --{name}, {info.data[name]}"
            raise refuse_value(f"is {value}", fix)
        return value

    @property
    def served_core(self) -> int:
        """K_c as it is served: moved to the nearest edge of a KV block within K.

        0 where there is no such edge, or no prefix cache: the image is then not split. As
        ``serving.api.layout.align_core``, whose module imports vLLM.
        """
        if self.core in (0, self.budget) or not self.block:
            return self.core if self.block else 0
        nearest = self.block - self.template % self.block
        edges = range(nearest, self.budget, self.block)
        return min(edges, key=lambda core: abs(core - self.core), default=0)


class Timings(FrozenModel):
    """Measured seconds."""

    decode_image: float = Field(
        default=0.0, ge=0, description="fetching and decoding one image"
    )
    processor: float = Field(
        default=0.0, ge=0, description="the image processor, one image"
    )
    tower: float = Field(ge=0, description="vision tower and projector, one image")
    selection: float = Field(default=0.0, ge=0, description="one selection")
    request: float = Field(
        default=0.0, ge=0, description="what a request takes however long its prompt is"
    )
    prefill: float = Field(gt=0, description="prefill of one token, all layers")
    decode: float = Field(default=0.0, ge=0, description="one decoded token")


@dataclass(slots=True)
class Inputs:
    """Values of :class:`Traffic` and :class:`Timings` by field, merged from several sources.

    ``notes`` say how the values were found and what they leave out. ``repeats`` are the times from
    all rounds of a measurement (those in ``values``), then from each resample of its rounds.
    """

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    repeats: list[dict[str, float]] = field(default_factory=list)

    def fill(self, *notes: str, **values: float | None) -> None:
        """Add values of a further source that no earlier one has; None is an unknown value."""
        for name, value in values.items():
            if value is not None:
                self.values.setdefault(name, value)
        self.notes += notes

    def assume(self) -> None:
        """Fill in values that no source has, and add notes that say so."""
        if "budget" not in self.values:
            # 576 to 64, 2880 to 320; without N it does not matter.
            budget = max(self.values.get("tokens", 1) // 9, 1)
            self.fill(
                f"K = {budget}, a ninth of N, because no --budget is given.",
                budget=budget,
            )
        if "core" not in self.values:
            core = int(_CORE_SHARE * self.values["budget"])
            self.fill(
                f"K_c = {core}, {_CORE_SHARE:.0%} of K: no --core is given.", core=core
            )
        unknown = [name for name in Timings.model_fields if name not in self.values]
        if unknown:
            names = ", ".join(unknown).replace("_", " ")
            self.fill(f"Counted as 0, because not known: {names}.")


@dataclass(frozen=True, slots=True)
class _Question:
    """Time to first token of a question, in seconds, and its ``seconds`` by part of the work."""

    ttft: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Cost of one way to serve the traffic, in seconds: a record of `advise --json`."""

    first: _Question
    another: _Question
    another_of_first: float
    total_seconds: float
    """Total of all questions on one image."""
    gain: float
    """Total of stock vLLM divided by this total."""
    cheaper_than_stock: Mapping[str, float | None] | None
    """Range of questions an image, ``from`` and ``to`` (None: unbounded), in which this costs less
    than stock; None if it never does."""
    mean_question: Mapping[str, float]
    """Seconds of a mean question by part, decoding included."""

    @property
    def advantage(self) -> str:
        """The range of :attr:`cheaper_than_stock` in words."""
        bounds = self.cheaper_than_stock or {}
        lower = bounds.get("from")
        upper = bounds.get("to")
        if lower is None:
            return "at no number of questions"
        if upper is not None:
            return f"up to {upper:.1f} questions"
        return (
            "at any number of questions"
            if lower <= 1
            else f"from {lower:.1f} questions on"
        )


def estimate_ways(traffic: Traffic, timings: Timings) -> dict[Way, _Estimate]:
    """Estimate every way to serve the traffic."""
    core = traffic.served_core
    later = traffic.questions - 1
    decoding = (traffic.answer - 1) * timings.decode

    def ask(
        front_end: float, tower: float, selections: int, visual: int, shared: int = 0
    ) -> _Question:
        """A question whose first ``template + shared`` tokens are in the prefix cache."""
        prefix = traffic.template + shared
        cached = prefix // traffic.block * traffic.block if traffic.block else 0
        # The template comes first in the prompt, so its blocks are the first to be found.
        image = visual - max(cached - traffic.template, 0)
        text = max(traffic.template - cached, 0) + traffic.prompt
        spent = (
            front_end,
            tower,
            selections * timings.selection,
            timings.request,
            image * timings.prefill,
            text * timings.prefill,
        )
        return _Question(math.fsum(spent), dict(zip(_REMEDIES, spent, strict=False)))

    estimates: dict[Way, _Estimate] = {}
    for way in WAYS:
        visual = traffic.tokens if way == "stock" else traffic.budget
        # Pruning happens behind the tower; only a smaller image spares it work.
        tower = timings.tower * (visual / traffic.tokens if way == "resized" else 1.0)
        # The core and the delta of a split are chosen one after the other.
        selections = 2 if way == "split" and core else int(way in _PRUNED)
        reads = way in ("question-reading", "split")
        shared = {"question-reading": 0, "split": core}.get(way, visual)
        new = ask(timings.decode_image + timings.processor, tower, selections, visual)
        another = ask(timings.decode_image, 0.0, int(reads), visual, shared)
        stock = estimates.get("stock")
        total = new.ttft + later * another.ttft + traffic.questions * decoding
        mean = {
            part: (seconds + later * another.seconds[part]) / traffic.questions
            for part, seconds in new.seconds.items()
        }
        advantage: dict[str, float | None] | None = None
        if stock:
            gain = stock.first.ttft - new.ttft
            later_gain = stock.another.ttft - another.ttft
            if gain > 0:
                advantage = {
                    "from": 1.0,
                    "to": None if later_gain >= 0 else 1 - gain / later_gain,
                }
            elif later_gain > 0:
                advantage = {"from": 1 - gain / later_gain, "to": None}
        estimates[way] = _Estimate(
            new,
            another,
            another.ttft / new.ttft,
            total,
            stock.total_seconds / total if stock else 1.0,
            advantage,
            {**mean, "decoding": decoding},
        )
    return estimates


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The advice to an operator; ``gain`` is the gain of the best pruned way.

    ``intervals`` are those into which the gain and each measured time of a repeated measurement
    fall.
    """

    helps: bool | None
    """None if the interval of the gain leaves it open."""
    gain: float
    intervals: Mapping[str, tuple[float, float]]
    lines: tuple[str, ...]


def judge(
    traffic: Traffic,
    estimates: Mapping[Way, _Estimate],
    repeats: Sequence[Timings] = (),
) -> _Verdict:
    """The verdict on the traffic, with its reasons."""
    if traffic.budget >= traffic.tokens:
        reason = (
            f"K = {traffic.budget} keeps every token of an image: nothing is pruned."
        )
        return _Verdict(False, 1.0, {}, ("Pruning will not help you here.", reason))
    gains = {way: estimate.gain for way, estimate in estimates.items()}
    best = max(_PRUNED, key=lambda way: gains[way])
    intervals = _find_intervals(traffic, best, repeats) if repeats else {}
    low, high = intervals.get("gain", (gains[best], gains[best]))
    helps = None if low < WORTHWHILE <= high else low >= WORTHWHILE
    decoding = estimates["stock"].mean_question["decoding"]
    is_unknown = traffic.answer > 1 and not decoding
    beside = ", without decoding, which is not known" if is_unknown else ""
    if helps:
        lines = [
            f"Pruning helps here: at {traffic.questions:g} questions an image, a {best} state "
            f"takes {1 / gains[best]:.2f} of stock vLLM's time{beside}."
        ]
    elif helps is None:
        lines = [
            f"This probe does not tell whether pruning helps: a gain below {WORTHWHILE} is none. "
            "Probe again while nothing else runs.",
            *_describe_stock(estimates["stock"]),
        ]
    else:
        lines = [
            "Pruning will not help you here.",
            *_describe_stock(estimates["stock"]),
        ]
    if "gain" in intervals:
        lines.append(
            f"Gain of {best}: {gains[best]:.2f}x; another probe finds {low:.2f}x to {high:.2f}x."
        )
    if helps:
        lines.append(_advise_on_reading(gains))
    if gains["resized"] >= max(WORTHWHILE, gains[best]):
        lines.append(
            f"Resizing images to {traffic.budget} tokens, where the model allows it, takes "
            f"{1 / gains['resized']:.2f} of stock's time, because it shortens the tower too: "
            "compare its accuracy with that of pruning."
        )
    return _Verdict(helps, gains[best], intervals, tuple(lines))


def _find_intervals(
    traffic: Traffic, way: Way, repeats: Sequence[Timings]
) -> dict[str, tuple[float, float]]:
    """Intervals of the gain of a way to serve, and of each time that was measured."""
    figures = {
        "gain": [estimate_ways(traffic, timings)[way].gain for timings in repeats]
    }
    for name in Timings.model_fields:
        figures[name] = [getattr(timings, name) for timings in repeats]
    intervals = {}
    for name, figure in figures.items():
        repetition = Estimate.of_repetition(np.asarray(figure))
        if repetition.low < repetition.high:
            intervals[name] = (max(repetition.low, 0.0), repetition.high)
    return intervals


def _describe_stock(stock: _Estimate) -> list[str]:
    """Where the time of a mean question goes with stock vLLM, and what would shorten it."""
    mean = stock.mean_question
    total = sum(mean.values())
    of_ttft = stock.first.seconds[_IMAGE] / stock.first.ttft
    largest = max(mean, key=lambda part: mean[part])
    return [
        f"With stock vLLM, {_IMAGE} is {mean[_IMAGE] / total:.0%} of a mean question's time "
        f"({of_ttft:.0%} of the first question's TTFT).",
        f"Most of the time, {mean[largest] / total:.0%}, is {largest}: {_REMEDIES[largest]}.",
    ]


def _advise_on_reading(gains: Mapping[Way, float]) -> str:
    """Whether reading the question is worth its time."""
    if gains["question-reading"] * WORTHWHILE >= gains["question-free"]:
        return (
            "Reading the question costs next to nothing at this number of questions: choose by "
            "accuracy at your K (`vllm-autoprune eval`)."
        )
    readers: tuple[Way, ...] = ("split", "question-reading")
    reader = max(readers, key=lambda way: gains[way])
    if gains[reader] >= WORTHWHILE:
        return (
            "A question-free state costs least. Read the question where your K needs it "
            f"(`vllm-autoprune eval`); {reader} then costs "
            f"{gains['question-free'] / gains[reader]:.2f} times as much."
        )
    return (
        "Only a question-free state pays at this number of questions; one that reads the question "
        f"is less than {WORTHWHILE:g} times as fast as stock."
    )
