"""Advice on a traffic: what each way to serve it costs, whether pruning helps, which state pays.

The cost model gives the time to first token of the first and of another question on an image.

Symbols: q questions an image; N visual tokens of an image, K kept ones, K_c of them core; T text
tokens before the image, U behind it, A of the answer; b tokens of a KV block.

    TTFT     = front end + tower + selection + request + p x (prompt - cached)
    cached   = floor((T + shared) / b) x b       the prefix that vLLM's prefix cache holds
    total(q) = TTFT(first) + (q - 1) x TTFT(another) + q x (A - 1) x time of a decoded token

A row is one way to serve; "decoding" (of the image) and "processor" make up the front end:

    way               visual  shared  first question pays                another question pays
    stock             N       N       decoding, processor, tower         decoding
    question-reading  K       0       the same and a selection           decoding, a selection
    split             K       K_c     the same and two selections        decoding, a selection
    question-free     K       K       the same and a selection           decoding
    resized           K       K       decoding, processor, K/N of tower  decoding

The first question shares the template alone; K_c is that of :func:`align_core`.
:data:`ASSUMPTIONS` lists what else is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from vllm_autoprune.errors import ConfigError, Problem

Way = Literal["stock", "question-reading", "split", "question-free", "resized"]
WAYS: tuple[Way, ...] = get_args(Way)

_CORE_SHARE = 0.75
"""Part of K that is core, where neither --core nor a state says it."""

_WORTHWHILE = 1.05
"""Least gain in total time that is called help; below it, estimate and measurement are too near."""

_PRUNED: tuple[Way, ...] = ("question-reading", "split", "question-free")
_READERS: tuple[Way, ...] = ("split", "question-reading")

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
    "A split selects twice for the first question and once for another. That is an upper bound: "
    "what the selection of the core computed is kept with the image.",
    "Decoded tokens take the same time in all ways to serve, which favours stock.",
    "Resized: the image is made so small that it has K tokens; tower time falls with the tokens.",
)


class _Inputs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Traffic(_Inputs):
    """Sizes of the requests on one image; see the module for the symbols."""

    questions: float = Field(ge=1, title="Q", description="mean number of questions on one image")
    tokens: int = Field(ge=1, title="N", description="visual tokens of an image")
    budget: int = Field(ge=1, title="K", description="kept tokens (default: N / 9)")
    core: int = Field(ge=0, title="K_c", description="core tokens of a split (default: 3/4 of K)")
    template: int = Field(default=0, ge=0, title="T", description="text tokens before the image")
    prompt: int = Field(default=32, ge=1, title="U", description="text tokens behind the image")
    answer: int = Field(default=64, ge=1, title="A", description="answer tokens")
    block: int = Field(
        default=16, ge=0, title="b", description="tokens of a KV block; 0: no prefix cache"
    )

    @field_validator("budget", "core")
    @classmethod
    def _check_part(cls, value: int, info: ValidationInfo) -> int:
        name = "tokens" if info.field_name == "budget" else "budget"
        if value > info.data.get(name, math.inf):
            raise ValueError(f"is {value}: give at most the value of --{name}, {info.data[name]}")
        return value


class Timings(_Inputs):
    """Measured seconds."""

    decode_image: float = Field(default=0.0, ge=0, description="fetching and decoding one image")
    processor: float = Field(default=0.0, ge=0, description="the image processor, one image")
    tower: float = Field(ge=0, description="vision tower and projector, one image")
    selection: float = Field(default=0.0, ge=0, description="one selection")
    request: float = Field(
        default=0.0, ge=0, description="what a request takes however long its prompt is"
    )
    prefill: float = Field(gt=0, description="prefill of one token, all layers")
    decode: float = Field(default=0.0, ge=0, description="one decoded token")


_REMEDIES: Mapping[str, str] = {
    "front end": "have clients send smaller images, or raise --api-server-count",
    "vision tower": "make images smaller (max_pixels of the image processor), or encode them in "
    "larger batches",
    "selection": "choose a state that selects faster (docs/states.md, What a state costs)",
    "request": "serve more requests at once: a step costs this much however few tokens it has",
    "prefill of text": "shorten the text, or put what all requests have in common before the image",
    "prefill of the image": "keep fewer tokens: a smaller --budget",
    "decoding": "answer shorter, decode in larger batches, or use speculative decoding",
}

PARTS = (
    "front end",
    "vision tower",
    "selection",
    "request",
    "prefill of the image",
    "prefill of text",
)
"""Where a time to first token goes."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """Questions an image, from ``lower`` to ``upper``, for which a way takes less than stock."""

    lower: float
    upper: float

    def __str__(self) -> str:
        if self.lower >= self.upper:
            return "at no number of questions"
        if math.isfinite(self.upper):
            return f"up to {self.upper:.1f} questions"
        lower = self.lower
        return "at any number of questions" if lower <= 1 else f"from {lower:.1f} questions on"


NEVER = Advantage(math.inf, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of one way to serve the traffic; seconds by the names of :data:`PARTS`."""

    first_question: Mapping[str, float]
    another_question: Mapping[str, float]
    decoding: float
    """Seconds of decoding one answer after its first token."""

    @property
    def ratio(self) -> float:
        """Another question's time to first token over the first one's."""
        ttft = ttft_of(self.first_question)
        return ttft_of(self.another_question) / ttft if ttft else math.nan

    def total(self, questions: float) -> float:
        """Seconds of all questions on one image."""
        later = (questions - 1) * ttft_of(self.another_question)
        return ttft_of(self.first_question) + later + questions * self.decoding

    def mean_parts(self, questions: float) -> dict[str, float]:
        """Seconds of a mean question by where they go, decoding included."""
        later = questions - 1
        mean = {
            part: (self.first_question[part] + later * self.another_question[part]) / questions
            for part in PARTS
        }
        return {**mean, "decoding": self.decoding}

    def advantage(self, stock: Estimate) -> Advantage:
        """Numbers of questions an image for which this takes less time than ``stock``."""
        gain_first = ttft_of(stock.first_question) - ttft_of(self.first_question)
        gain_later = ttft_of(stock.another_question) - ttft_of(self.another_question)
        if gain_first > 0:
            return Advantage(1.0, math.inf if gain_later >= 0 else 1 - gain_first / gain_later)
        return Advantage(1 - gain_first / gain_later, math.inf) if gain_later > 0 else NEVER


def ttft_of(parts: Mapping[str, float]) -> float:
    """Time to first token."""
    return math.fsum(parts.values())


def shares_of(parts: Mapping[str, float]) -> dict[str, float]:
    """Share of each part in the time to first token."""
    ttft = ttft_of(parts)
    return {name: seconds / ttft if ttft else 0.0 for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class Known:
    """Values of :class:`Traffic` and :class:`Timings` by field, as far as they are known.

    ``notes`` say how they were found and what they leave out.
    """

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def filled_from(self, other: Known) -> Known:
        """These values, and those of ``other`` where there is none here."""
        return Known({**other.values, **self.values}, (*self.notes, *other.notes))


def keep_known(*notes: str, **values: float | None) -> Known:
    """The values that are not None."""
    return Known({name: value for name, value in values.items() if value is not None}, notes)


def complete(known: Known) -> Known:
    """The values with what is assumed of the missing ones, and notes that say so."""
    values, notes = dict(known.values), list(known.notes)
    if "budget" not in values:
        # 576 to 64, 2880 to 320; without N it does not matter.
        values["budget"] = max(values.get("tokens", 1) // 9, 1)
        notes.append(f"K = {values['budget']}, a ninth of N, because no --budget is given.")
    if "core" not in values:
        values["core"] = int(_CORE_SHARE * values["budget"])
        notes.append(f"K_c = {values['core']}, {_CORE_SHARE:.0%} of K: no --core is given.")
    if unknown := [name.replace("_", " ") for name in Timings.model_fields if name not in values]:
        notes.append(f"Counted as 0, because not known: {', '.join(unknown)}.")
    return Known(values, tuple(notes))


def estimate_ways(traffic: Traffic, timings: Timings) -> dict[Way, Estimate]:
    """Every way to serve the traffic."""
    decoding = max(traffic.answer - 1, 0) * timings.decode
    core = align_core(traffic)

    def name_parts(
        front_end: float, tower: float, selections: int, visual: int, shared: int
    ) -> dict[str, float]:
        """Seconds by part, where ``template + shared`` tokens are in the prefix cache."""
        prefix = traffic.template + shared
        cached = prefix // traffic.block * traffic.block if traffic.block else 0
        # The template comes first in the prompt, so its blocks are the first to be found.
        image = visual - max(cached - traffic.template, 0)
        text = max(traffic.template - cached, 0) + traffic.prompt
        seconds = (front_end, tower, selections * timings.selection, timings.request)
        prefill = (image * timings.prefill, text * timings.prefill)
        return dict(zip(PARTS, (*seconds, *prefill), strict=True))

    estimates = {}
    for way in WAYS:
        visual = traffic.tokens if way == "stock" else traffic.budget
        selects, reads = way not in ("stock", "resized"), way in ("question-reading", "split")
        # Pruning happens behind the tower; only a smaller image spares it work.
        tower = timings.tower * (visual / traffic.tokens if way == "resized" else 1.0)
        # The core and the delta of a split are chosen one after the other.
        selections = 2 if way == "split" and core else int(selects)
        shared = {"question-reading": 0, "split": core}.get(way, visual)
        front_end = timings.decode_image + timings.processor
        estimates[way] = Estimate(
            name_parts(front_end, tower, selections, visual, 0),
            name_parts(timings.decode_image, 0.0, int(reads), visual, shared),
            decoding,
        )
    return estimates


def align_core(traffic: Traffic) -> int:
    """K_c as it is served: moved to the nearest edge of a KV block within K.

    0 where there is no such edge, or no prefix cache: the image is then not split. As
    ``serving.api.split.align_core``.
    """
    if traffic.core in (0, traffic.budget) or not traffic.block:
        return traffic.core if traffic.block else 0
    nearest = traffic.block - traffic.template % traffic.block
    edges = range(nearest, traffic.budget, traffic.block)
    return min(edges, key=lambda core: abs(core - traffic.core), default=0)


def fit_layers(layers: int | None, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per token and per request, all layers, from one layer's seconds at some lengths.

    One length: proportional. More: the line through the shortest and the longest. Raises
    :class:`ConfigError` without the number of layers.
    """
    if layers is None or layers < 1:
        fix = "give the number of layers of the language model"
        raise ConfigError("inputs", [Problem("--layer-ms", "needs --layers", fix)])
    (short, low), (long, high) = min(points), max(points)
    if short == long:
        return layers * low / short, 0.0
    slope = (high - low) / (long - short)
    return layers * slope, max(layers * (low - slope * short), 0.0)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The advice to an operator."""

    helps: bool
    gain: float
    """Stock's total time over that of the pruned way with the least."""
    lines: tuple[str, ...]


def judge(traffic: Traffic, estimates: Mapping[Way, Estimate]) -> _Verdict:
    """The verdict on the traffic, with its reasons."""
    questions, stock = traffic.questions, estimates["stock"]
    if traffic.budget >= traffic.tokens:
        reason = f"K = {traffic.budget} keeps every token of an image: nothing is pruned."
        return _Verdict(False, 1.0, ("Pruning will not help you here.", reason))
    gains = {way: stock.total(questions) / e.total(questions) for way, e in estimates.items()}
    best = max(_PRUNED, key=lambda way: gains[way])
    helps = gains[best] >= _WORTHWHILE
    if helps:
        lines = [
            f"Pruning helps here: at {questions:g} questions an image, a {best} state takes "
            f"{1 / gains[best]:.2f} of stock vLLM's time."
        ]
    else:
        # Where the time of a mean question goes with stock vLLM, and what would shorten it.
        parts = stock.mean_parts(questions)
        mean = sum(parts.values())
        image, shares = "prefill of the image", shares_of(stock.first_question)
        lines = [
            "Pruning will not help you here.",
            f"With stock vLLM, prefill of the image is {parts[image] / mean:.0%} of a mean "
            f"question's time ({shares[image]:.0%} of the first question's TTFT).",
        ]
        if shares[image] >= 0.2 > parts[image] / mean:
            lines.append(
                f"At {questions:g} questions an image, stock vLLM prefills the image once and "
                "finds it in its prefix cache for all the others; there is little left to save."
            )
        name, seconds = max(parts.items(), key=lambda part: part[1])
        lines.append(f"Most of the time, {seconds / mean:.0%}, is {name}: {_REMEDIES[name]}.")
    for way in _PRUNED:
        advantage = estimates[way].advantage(stock)
        inside = advantage == NEVER or advantage.lower <= questions < advantage.upper
        lines.append(
            f"{way}: {1 / gains[way]:.2f} of stock's time; cheaper than stock {advantage}"
            + ("." if inside else f", and you have {questions:g}.")
        )
    if helps:
        # Whether reading the question is worth its time.
        free = gains["question-free"]
        pays = [way for way in _READERS if gains[way] >= _WORTHWHILE]
        if gains["question-reading"] * _WORTHWHILE >= free:
            lines.append(
                "Reading the question costs next to nothing at this number of questions: choose by "
                "accuracy at your K (`vllm-autoprune eval`)."
            )
        elif pays:
            lines.append(
                "A question-free state costs least. Read the question where your K needs it "
                f"(`vllm-autoprune eval`); {pays[0]} then costs "
                f"{free / gains[pays[0]]:.2f} times as much."
            )
        else:
            lines.append(
                "Only a question-free state pays at this number of questions; one that reads the "
                "question costs more than stock, or as much."
            )
        shares = shares_of(estimates[best].first_question)
        name, share = max(shares.items(), key=lambda part: part[1])
        if name != "prefill of the image" and share >= 0.4:
            lines.append(
                f"With pruning, {share:.0%} of the first question's TTFT is {name}, which "
                f"no budget shortens: {_REMEDIES[name]}."
            )
    if gains["resized"] >= max(_WORTHWHILE, gains[best]):
        lines.append(
            f"Resizing images to {traffic.budget} tokens, where the model allows it, takes "
            f"{1 / gains['resized']:.2f} of stock's time, because it shortens the tower too: "
            "compare its accuracy with that of pruning."
        )
    core = align_core(traffic)
    if not core and traffic.core:
        reason = "no KV block ends within them" if traffic.block else "there is no prefix cache"
        lines.append(f"The K tokens of an image are not split, because {reason}.")
    elif core != traffic.core:
        lines.append(
            f"The core is served with {core} tokens instead of {traffic.core}, so that it ends on "
            "the edge of a KV block."
        )
    return _Verdict(helps, gains[best], tuple(lines))
