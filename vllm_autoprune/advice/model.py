"""Time to first token of the first and of another question on an image, for each way to serve it.

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

The first question shares the template alone; K_c is that of :func:`aligned_core`.
:data:`ASSUMPTIONS` lists what else is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from vllm_autoprune.errors import ConfigError, Problem

Way = Literal["stock", "question-reading", "split", "question-free", "resized"]
WAYS: tuple[Way, ...] = ("stock", "question-reading", "split", "question-free", "resized")

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


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sizes of the requests on one image; see the module for the symbols."""

    questions: float
    tokens: int
    budget: int
    core: int
    template: int = 0
    prompt: int = 32
    answer: int = 64
    block: int = 16
    """Tokens of a KV block; 0: no prefix cache."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured seconds."""

    tower: float
    """Vision tower and projector, one image."""
    prefill: float
    """p: prefill of one prompt token, all layers."""
    decode_image: float = 0.0
    """Fetching and decoding one image in the API server."""
    processor: float = 0.0
    """The image processor in the API server, one image."""
    selection: float = 0.0
    """One selection of K tokens."""
    request: float = 0.0
    """All that a request takes however long its prompt is: HTTP, scheduling, a step, sampling."""
    decode: float = 0.0
    """One decoded token after the first."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one time to first token, by where they go."""

    front_end: float
    tower: float
    selection: float
    request: float
    image_prefill: float
    text_prefill: float

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return float(sum(astuple(self)))

    def seconds(self) -> dict[str, float]:
        """Seconds by the name of the part."""
        return dict(zip(PART_NAMES, astuple(self), strict=True))

    def shares(self) -> dict[str, float]:
        """Share of each part in the time to first token."""
        whole = self.ttft
        return {name: part / whole if whole else 0.0 for name, part in self.seconds().items()}


PART_NAMES = (
    "front end",
    "vision tower",
    "selection",
    "request",
    "prefill of the image",
    "prefill of text",
)


@dataclass(frozen=True, slots=True)
class Advantage:
    """Questions an image, from ``lower`` to ``upper``, for which a way takes less than stock."""

    lower: float
    upper: float

    @property
    def never(self) -> bool:
        """Whether stock takes no longer at any number of questions."""
        return self.lower >= self.upper


NEVER = Advantage(math.inf, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of one way to serve the traffic."""

    way: Way
    first: Parts
    another: Parts
    decoding: float
    """Seconds of decoding one answer after its first token."""

    @property
    def ratio(self) -> float:
        """Another question's time to first token over the first one's."""
        return self.another.ttft / self.first.ttft if self.first.ttft else math.nan

    def total(self, questions: float) -> float:
        """Seconds of all questions on one image."""
        later = (questions - 1) * self.another.ttft
        return self.first.ttft + later + questions * self.decoding

    def advantage(self, stock: Estimate) -> Advantage:
        """Numbers of questions an image for which this takes less time than ``stock``."""
        first = stock.first.ttft - self.first.ttft
        later = stock.another.ttft - self.another.ttft
        if first > 0:
            return Advantage(1.0, math.inf if later >= 0 else 1 - first / later)
        return Advantage(1 - first / later, math.inf) if later > 0 else NEVER


def estimate_ways(traffic: Traffic, timings: Timings) -> dict[Way, Estimate]:
    """Every way to serve the traffic; raises :class:`ConfigError` listing all wrong values."""
    _check(traffic, timings)
    decoding = max(traffic.answer - 1, 0) * timings.decode
    return {
        way: Estimate(way, _first(way, traffic, timings), _another(way, traffic, timings), decoding)
        for way in WAYS
    }


def aligned_core(traffic: Traffic) -> int:
    """K_c as it is served: moved to the nearest edge of a KV block within K.

    0 where there is no such edge, or no prefix cache: the image is then not split. As
    ``serving.api.image_split.align_core``.
    """
    if traffic.core in (0, traffic.budget) or not traffic.block:
        return traffic.core if traffic.block else 0
    first = traffic.block - traffic.template % traffic.block
    edges = range(first, traffic.budget, traffic.block)
    return min(edges, key=lambda core: abs(core - traffic.core), default=0)


def fit_layers(layers: int, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per token and per request, all layers, from one layer's seconds at some lengths.

    One length: proportional. More: the line through the shortest and the longest.
    """
    (short, low), (long, high) = min(points), max(points)
    if short == long:
        return layers * low / short, 0.0
    slope = (high - low) / (long - short)
    return layers * slope, max(layers * (low - slope * short), 0.0)


def _first(way: Way, traffic: Traffic, timings: Timings) -> Parts:
    split = 2 if aligned_core(traffic) else 1
    selections = {"question-reading": 1, "split": split, "question-free": 1}.get(way, 0)
    resized = way == "resized"
    image, text = _computed(traffic, _visual(way, traffic), 0)
    return Parts(
        front_end=timings.decode_image + timings.processor,
        tower=timings.tower * (traffic.budget / traffic.tokens if resized else 1.0),
        selection=selections * timings.selection,
        request=timings.request,
        image_prefill=image * timings.prefill,
        text_prefill=text * timings.prefill,
    )


def _another(way: Way, traffic: Traffic, timings: Timings) -> Parts:
    reads = way in ("question-reading", "split")
    visual = _visual(way, traffic)
    shared = {"question-reading": 0, "split": aligned_core(traffic)}.get(way, visual)
    image, text = _computed(traffic, visual, shared)
    return Parts(
        front_end=timings.decode_image,
        tower=0.0,
        selection=timings.selection if reads else 0.0,
        request=timings.request,
        image_prefill=image * timings.prefill,
        text_prefill=text * timings.prefill,
    )


def _visual(way: Way, traffic: Traffic) -> int:
    return traffic.tokens if way == "stock" else traffic.budget


def _computed(traffic: Traffic, visual: int, shared: int) -> tuple[int, int]:
    """Visual and text tokens that are prefilled although ``template + shared`` are known."""
    prefix = traffic.template + shared
    cached = prefix // traffic.block * traffic.block if traffic.block else 0
    before = max(traffic.template - cached, 0)
    image = visual - max(cached - traffic.template, 0)
    return image, before + traffic.prompt


def _check(traffic: Traffic, timings: Timings) -> None:
    problems = [
        Problem(f"--{name}", f"is {value:g}", f"give {least} or more")
        for name, value, least in (
            ("questions", traffic.questions, 1),
            ("tokens", traffic.tokens, 1),
            ("budget", traffic.budget, 1),
            ("core", traffic.core, 0),
            ("template", traffic.template, 0),
            ("prompt", traffic.prompt, 1),
            ("answer", traffic.answer, 1),
            ("block-size", traffic.block, 0),
        )
        if not least <= value < math.inf
    ]
    if traffic.core > traffic.budget:
        what = f"is {traffic.core}, more than the {traffic.budget} tokens that are kept"
        problems.append(Problem("--core", what, "give at most the value of --budget"))
    if traffic.budget > traffic.tokens:
        what = f"is {traffic.budget}, more than the {traffic.tokens} tokens of an image"
        problems.append(Problem("--budget", what, "give at most the value of --tokens"))
    if not all(0 <= seconds < math.inf for seconds in astuple(timings)):
        problems.append(Problem("times", "are not all finite and 0 or more", "correct them"))
    if timings.prefill == 0:
        problems.append(Problem("--prefill-ms-per-token", "is 0", "give a time above 0"))
    if problems:
        raise ConfigError("inputs", problems)
