"""Random requests of every kind, each with the counts that a server should have for it.

Half of the pictures are new and half are of a few that are repeated, so that every cache fills, is
hit, and has to evict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from PIL import Image

from benchmarks.common.client import build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from vllm_autoprune.tpdsl.states.load import load_state

BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096)
OWN_BUDGETS = (16, 32, 64)
POLICIES = ("visionzip", "fastv", "prumerge_plus", "dart", "divprune", "trim", "sparsevlm")
QUESTIONS = (
    "What digit is on the red shape?",
    "What colour is the circle?",
    "How many blue shapes are there?",
    "Is there a green square?",
    "Which shape is left of the triangle?",
    "What is shown?",
)
REPEATED = 12
"""Pictures that are repeated."""

SIDE = 96
"""Side of the pictures, pixels."""

_KINDS = (
    ("plain", 20),
    ("budget", 25),
    ("policy", 20),
    ("own", 4),
    ("control", 8),
    ("off", 8),
    ("two", 10),
    ("bad", 5),
)


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, SIDE, SIDE) for seed in range(REPEATED)]
    return [(image, encode_picture(image)) for image in pictures]


@dataclass(frozen=True, slots=True)
class Request:
    """The body of a request, its expected HTTP status, and what is counted if it gets that.

    ``before`` and ``after`` are visual tokens.
    """

    kind: str
    body: bytes
    policy: str
    keep: str
    images: int
    before: int
    after: int
    status: int = 200


@dataclass(frozen=True)
class RequestMix:
    """Draws requests; N tokens an image, state and K are those of the server."""

    model: str
    tokens: int
    state: str
    budget: int
    answer: int = 4
    _repeated: Sequence[tuple[Image.Image, str]] = field(
        default_factory=_draw_repeated_pictures, repr=False
    )

    def draw(self, random: Random) -> Request:
        """One request of a random kind."""
        names, weights = zip(*_KINDS, strict=True)
        (kind,) = random.choices(names, weights)
        return _BUILDERS[kind](self, random)

    def _build(
        self,
        kind: str,
        random: Random,
        entry: object,
        budgets: Sequence[int],
        policy: str,
        keep: str = "state",
        status: int = 200,
    ) -> Request:
        urls = [self._draw_image(random) for _ in budgets]
        fields: dict[str, object] = {"ignore_eos": True}
        if entry is not None:
            fields["mm_processor_kwargs"] = {"autoprune": entry}
        content = build_content(random.choice(QUESTIONS), urls)
        sent = build_body(self.model, content, tokens=self.answer, stream=False, fields=fields)
        after = sum(min(budget, self.tokens) for budget in budgets)
        before = self.tokens * len(budgets)
        return Request(kind, sent, policy, keep, len(budgets), before, after, status)

    def _draw_image(self, random: Random) -> str:
        image, url = random.choice(self._repeated)
        if random.random() < 0.5:
            return url
        return encode_picture(image.rotate(random.random() * 360))

    def _plain(self, random: Random) -> Request:
        return self._build("plain", random, None, [self.budget], self.state)

    def _budget(self, random: Random) -> Request:
        budget = random.choice(BUDGETS)
        return self._build("budget", random, {"budget": budget}, [budget], self.state)

    def _policy(self, random: Random) -> Request:
        name, budget = random.choice(POLICIES), random.choice(BUDGETS)
        return self._build("policy", random, {"state": name, "budget": budget}, [budget], name)

    def _state(self, random: Random) -> Request:
        """A request that brings a random state of its own."""
        state, budget = json.loads(load_state(self.state).dumps()), random.choice(OWN_BUDGETS)
        state["scoring"]["signals"][0]["weight"] = round(random.uniform(0.1, 0.9), 3)
        return self._build("own", random, {"state": state, "budget": budget}, [budget], "request")

    def _control(self, random: Random) -> Request:
        keep, budget = random.choice(("reference", "random")), random.choice(BUDGETS)
        return self._build(
            "control", random, {"keep": keep, "budget": budget}, [budget], self.state, keep
        )

    def _off(self, random: Random) -> Request:
        return self._build("off", random, {"enabled": False}, [self.tokens], "off")

    def _two(self, random: Random) -> Request:
        budgets = [random.choice(BUDGETS[:-1]) for _ in range(2)]
        return self._build("two", random, {"budget": budgets}, budgets, self.state)

    def _bad(self, random: Random) -> Request:
        entry = random.choice(
            ({"budget": 0}, {"state": "nobody"}, {"buget": 8}, {"budget": [8, 8]})
        )
        return self._build("bad", random, entry, [self.budget], "", status=400)


_BUILDERS: dict[str, Callable[[RequestMix, Random], Request]] = {
    "plain": RequestMix._plain,
    "budget": RequestMix._budget,
    "policy": RequestMix._policy,
    "own": RequestMix._state,
    "control": RequestMix._control,
    "off": RequestMix._off,
    "two": RequestMix._two,
    "bad": RequestMix._bad,
}
