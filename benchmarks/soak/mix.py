"""Requests of every kind, each with what a server has to count for it.

Knows nothing about servers. Images and states never end: half of the requests show a new picture or
one of a few that come again and again, so that every cache fills, is hit, and has to let go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from PIL import Image

from benchmarks.load.pictures import encoded, picture
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
HOT = 12
"""Pictures that come again and again."""

SIDE = 96
"""Pixels; the model's processor makes its own size of them."""

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
def _pictures() -> Sequence[tuple[Image.Image, str]]:
    drawn = [picture(seed, SIDE, SIDE) for seed in range(HOT)]
    return [(image, encoded(image, "png")) for image in drawn]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its body, and what is counted where it is answered as it should be.

    ``before`` and ``after`` are visual tokens; ``status`` is the HTTP status that it has to get.
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
class Mix:
    """What is drawn from: N tokens an image, and the state and K that the server has itself."""

    model: str
    tokens: int
    state: str
    budget: int
    answer: int = 4
    _hot: Sequence[tuple[Image.Image, str]] = field(default_factory=_pictures, repr=False)

    def draw(self, random: Random) -> Ask:
        """The next request."""
        names, weights = zip(*_KINDS, strict=True)
        (kind,) = random.choices(names, weights)
        return _MAKERS[kind](self, random)

    def _ask(
        self,
        kind: str,
        random: Random,
        entry: object,
        budgets: Sequence[int],
        policy: str,
        keep: str = "state",
        status: int = 200,
    ) -> Ask:
        shown = [
            {"type": "image_url", "image_url": {"url": self._picture(random)}} for _ in budgets
        ]
        said = {"type": "text", "text": random.choice(QUESTIONS)}
        body: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*shown, said]}],
            "temperature": 0,
            "max_tokens": self.answer,
            "ignore_eos": True,
        }
        if entry is not None:
            body["mm_processor_kwargs"] = {"autoprune": entry}
        after = sum(min(budget, self.tokens) for budget in budgets)
        sent, before = json.dumps(body).encode(), self.tokens * len(budgets)
        return Ask(kind, sent, policy, keep, len(budgets), before, after, status)

    def _picture(self, random: Random) -> str:
        image, sent = random.choice(self._hot)
        return (
            sent if random.random() < 0.5 else encoded(image.rotate(random.random() * 360), "png")
        )

    def _plain(self, random: Random) -> Ask:
        return self._ask("plain", random, None, [self.budget], self.state)

    def _budget(self, random: Random) -> Ask:
        budget = random.choice(BUDGETS)
        return self._ask("budget", random, {"budget": budget}, [budget], self.state)

    def _policy(self, random: Random) -> Ask:
        name, budget = random.choice(POLICIES), random.choice(BUDGETS)
        return self._ask("policy", random, {"policy": name, "budget": budget}, [budget], name)

    def _state(self, random: Random) -> Ask:
        """A whole state that hardly any other request brings."""
        state, budget = json.loads(load_state(self.state).dumps()), random.choice(OWN_BUDGETS)
        state["scoring"]["signals"][0]["weight"] = round(random.uniform(0.1, 0.9), 3)
        return self._ask("own", random, {"policy": state, "budget": budget}, [budget], "request")

    def _control(self, random: Random) -> Ask:
        keep, budget = random.choice(("reference", "random")), random.choice(BUDGETS)
        return self._ask(
            "control", random, {"keep": keep, "budget": budget}, [budget], self.state, keep
        )

    def _off(self, random: Random) -> Ask:
        return self._ask("off", random, {"enabled": False}, [self.tokens], "off")

    def _two(self, random: Random) -> Ask:
        budgets = [random.choice(BUDGETS[:-1]) for _ in range(2)]
        return self._ask("two", random, {"budget": budgets}, budgets, self.state)

    def _bad(self, random: Random) -> Ask:
        entry = random.choice(
            ({"budget": 0}, {"policy": "nobody"}, {"buget": 8}, {"budget": [8, 8]})
        )
        return self._ask("bad", random, entry, [self.budget], "", status=400)


_MAKERS: dict[str, Callable[[Mix, Random], Ask]] = {
    "plain": Mix._plain,
    "budget": Mix._budget,
    "policy": Mix._policy,
    "own": Mix._state,
    "control": Mix._control,
    "off": Mix._off,
    "two": Mix._two,
    "bad": Mix._bad,
}
