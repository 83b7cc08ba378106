"""Random requests of every kind, each with the counts that a server should have for it.

Half of the pictures are new and half are of a few that are repeated, so that every cache fills, is
hit, and has to evict. Every request goes to the model or to one of its adapters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from PIL import Image

from benchmarks.common.client import build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from vllm_autoprune.serving.api.image_split import SplitImage, align_core
from vllm_autoprune.tpdsl.loading import load_state

BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096)
OWN_BUDGETS = (16, 32, 64)
POLICIES = ("visionzip", "prumerge_plus", "divprune", "trim", "cdpruner", "cen_cdpruner")
"""None that reads the language model's layers: those are refused where adapters change them."""
SPLIT_STATES = ("shared-core", "minillava-split")
SPLIT_BUDGETS = (16, 32, 48, 64, 96, 143, 4096)
RECALLS = (None, 0, 1, 8, 24, 4096)
"""K_r of conversations; None: the server's."""
BLOCK = 32
"""Tokens of a KV block."""
LONG_ANSWER = 160
"""Tokens of an answer that a client may hang up on."""
QUESTIONS = (
    "What digit is on the red shape?",
    "What colour is the circle?",
    "How many blue shapes are there?",
    "Is there a green square?",
    "Which shape is left of the triangle?",
    "What is shown?",
)
ANSWERS = ("red", "two", "no")
REPEATED = 12
"""Pictures that are repeated."""

SIDE = 96
"""Side of the pictures, pixels."""

KINDS = (
    ("plain", 20),
    ("budget", 25),
    ("policy", 20),
    ("own", 8),
    ("control", 8),
    ("off", 8),
    ("two", 10),
    ("split", 15),
    ("conversation", 15),
    ("bad", 5),
)


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, SIDE, SIDE) for seed in range(REPEATED)]
    return [(image, encode_picture(image)) for image in pictures]


@dataclass(frozen=True, slots=True)
class Request:
    """The body of a request, its expected HTTP status, and what is counted if it gets that.

    ``before`` and ``after`` are visual tokens; ``core`` and ``recalled`` of those after.
    """

    kind: str
    body: bytes
    policy: str
    keep: str
    images: int
    before: int
    after: int
    status: int = 200
    core: int = 0
    recalled: int = 0


@dataclass(frozen=True)
class RequestMix:
    """Draws requests; N tokens an image, state, K and K_r are those of the server.

    ``start`` tokens of a prompt stand before its image. ``adapters`` are names of models too.
    """

    model: str
    tokens: int
    state: str
    budget: int
    recall: int = 0
    start: int = 0
    adapters: Sequence[str] = ()
    answer: int = 4
    _repeated: Sequence[tuple[Image.Image, str]] = field(
        default_factory=_draw_repeated_pictures, repr=False
    )

    def draw(self, random: Random) -> Request:
        """One request of a random kind."""
        names, weights = zip(*KINDS, strict=True)
        (kind,) = random.choices(names, weights)
        return _BUILDERS[kind](self, random)

    def draw_stream(self, random: Random) -> Request:
        """One request, valid by itself, for a long answer that is streamed with its usage."""
        kind = random.choice(("plain", "budget", "policy", "off", "two", "split", "conversation"))
        request = _BUILDERS[kind](self, random)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        streamed = {"stream": True, "stream_options": usage, "max_tokens": LONG_ANSWER}
        return replace(request, body=json.dumps({**json.loads(request.body), **streamed}).encode())

    def _build(
        self,
        kind: str,
        random: Random,
        entry: object,
        budgets: Sequence[int],
        policy: str,
        keep: str = "state",
        status: int = 200,
        later: int = 0,
    ) -> Request:
        """A request about images of these budgets, with ``later`` turns behind that of theirs."""
        urls = [self._draw_image(random) for _ in budgets]
        messages = [
            {"role": "user", "content": build_content(random.choice(QUESTIONS), urls)},
            *(message for _ in range(later) for message in _draw_turn(random)),
        ]
        fields: dict[str, object] = {"ignore_eos": True, "messages": messages}
        if entry is not None:
            fields["mm_processor_kwargs"] = {"autoprune": entry}
        model = random.choice((self.model, *self.adapters))
        sent = build_body(model, [], tokens=self.answer, stream=False, fields=fields)
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
        state["scoring"]["signals"][0]["weight"] = round(random.uniform(0.1, 0.9), 2)
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

    def _split(self, random: Random) -> Request:
        name, budget = random.choice(SPLIT_STATES), random.choice(SPLIT_BUDGETS)
        request = self._build("split", random, {"state": name, "budget": budget}, [budget], name)
        return replace(request, core=self._count_core(name, budget))

    def _conversation(self, random: Random) -> Request:
        """Later turns that recall tokens of the image, of a state with a core or without."""
        turns, own = random.choice((1, 2, 3)), random.choice(RECALLS)
        entry: dict[str, object] = {} if own is None else {"recall": own}
        state, budget, core = self.state, self.budget, 0
        if random.random() < 0.5:
            state, budget = random.choice(SPLIT_STATES), random.choice(SPLIT_BUDGETS)
            entry |= {"state": state, "budget": budget}
            core = self._count_core(state, budget)
        request = self._build("conversation", random, entry, [budget], state, later=turns)
        left = self.tokens - request.after
        recalled = min(turns * (self.recall if own is None else own), left)
        return replace(request, after=request.after + recalled, core=core, recalled=recalled)

    def _count_core(self, name: str, budget: int) -> int:
        """Tokens of an image's core: up to the edge of a KV block, as the prompt has them."""
        core = load_state(name).core
        if core is None or budget >= self.tokens or not (wanted := core.tokens(budget)):
            return 0
        return align_core(self.start, SplitImage(budget, wanted, None), BLOCK)

    def _bad(self, random: Random) -> Request:
        entry = random.choice(
            ({"budget": 0}, {"state": "nobody"}, {"buget": 8}, {"budget": [8, 8]}, {"recall": -1})
        )
        return self._build("bad", random, entry, [self.budget], "", status=400)


def _draw_turn(random: Random) -> list[dict[str, object]]:
    """An answer and the next question."""
    answer: dict[str, object] = {"role": "assistant", "content": random.choice(ANSWERS)}
    return [answer, {"role": "user", "content": random.choice(QUESTIONS)}]


_BUILDERS: dict[str, Callable[[RequestMix, Random], Request]] = {
    "plain": RequestMix._plain,
    "budget": RequestMix._budget,
    "policy": RequestMix._policy,
    "own": RequestMix._state,
    "control": RequestMix._control,
    "off": RequestMix._off,
    "two": RequestMix._two,
    "split": RequestMix._split,
    "conversation": RequestMix._conversation,
    "bad": RequestMix._bad,
}
