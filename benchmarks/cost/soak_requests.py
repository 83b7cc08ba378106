"""Random requests of every kind for the soak, with the counts that a server should have of each.

Half of the pictures are new and half are of a few that are repeated, so that every cache fills, is
hit, and has to evict. Every request goes to the model or to one of its adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from PIL import Image

from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from vllm_autoprune.serving.api.split import SplitImage, align_core
from vllm_autoprune.tpdsl.loading import load_state

BLOCK = 32
"""Tokens of a KV block."""
_BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096)
POLICIES = ("visionzip", "prumerge_plus", "divprune", "trim", "cdpruner", "cen_cdpruner")
"""None that reads the language model's layers: those are refused where adapters change them."""
_SPLIT_STATES = ("shared-core", "minillava-split")
_SPLIT_BUDGETS = (16, 32, 48, 64, 96, 143, 4096)
_RECALLS = (None, 0, 1, 8, 24, 4096)
"""K_r of conversations; None: the server's."""
_BAD = ({"budget": 0}, {"state": "nobody"}, {"buget": 8}, {"budget": [8, 8]}, {"recall": -1})
_QUESTIONS = (
    "What digit is on the red shape?",
    "What colour is the circle?",
    "How many blue shapes are there?",
    "Is there a green square?",
    "Which shape is left of the triangle?",
    "What is shown?",
)
_REPEATED = 12
"""Pictures that are repeated."""
SIDE = 96
"""Side of the pictures, pixels."""
LONG_ANSWER = 160
"""Tokens of an answer that a client may hang up on."""

KINDS = {
    "plain": 20,
    "budget": 25,
    "policy": 20,
    "own": 8,
    "control": 8,
    "off": 8,
    "two": 10,
    "split": 15,
    "conversation": 15,
    "bad": 5,
}
"""Kinds of requests with their weights."""
_STREAMED = ("plain", "budget", "policy", "off", "two", "split", "conversation")


@dataclass(frozen=True, slots=True)
class Request:
    """The body of a request, its expected HTTP status, and by what the server's counters grow."""

    kind: str
    body: bytes
    status: int
    counts: Mapping[str, float]


@dataclass(frozen=True)
class RequestMix:
    """Draws requests; N tokens an image, state, K and K_r are those of the server.

    ``kv_bytes`` is the size of a token in the KV cache; ``start`` tokens of a prompt stand before
    its image. ``adapters`` are names of models too.
    """

    model: str
    tokens: int
    state: str
    budget: int
    recall: int
    kv_bytes: int
    start: int = 0
    adapters: Sequence[str] = ()

    def draw(self, random: Random, *, stream: bool = False) -> Request:
        """A request of a random kind, to the model or one of its adapters.

        ``stream``: a valid one for a long answer, which is streamed with its usage.
        """
        if stream:
            kind = random.choice(_STREAMED)
        else:
            (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        entry: dict[str, object] = {}
        budgets, policy, keep, turns, recall = [self.budget], self.state, "state", 0, self.recall
        if kind in ("budget", "policy", "control"):
            budgets = [random.choice(_BUDGETS)]
            entry["budget"] = budgets[0]
        if kind == "policy":
            entry["state"] = policy = random.choice(POLICIES)
        elif kind == "own":  # a random state that the request brings
            state = json.loads(load_state(self.state).dumps())
            state["scoring"]["signals"][0]["weight"] = round(random.uniform(0.1, 0.9), 2)
            policy, budgets = "request", [random.choice((16, 32, 64))]
            entry |= {"state": state, "budget": budgets[0]}
        elif kind == "control":
            entry["keep"] = keep = random.choice(("reference", "random"))
        elif kind == "off":
            policy, budgets, entry["enabled"] = "off", [self.tokens], False
        elif kind == "two":
            budgets = [random.choice(_BUDGETS[:-1]) for _ in range(2)]
            entry["budget"] = budgets
        elif kind == "conversation":  # later turns recall tokens, of a state with a core or without
            turns, asked = random.choice((1, 2, 3)), random.choice(_RECALLS)
            if asked is not None:
                entry["recall"] = recall = asked
        elif kind == "bad":
            entry = dict(random.choice(_BAD))
        if kind == "split" or (kind == "conversation" and random.random() < 0.5):
            policy, budgets = random.choice(_SPLIT_STATES), [random.choice(_SPLIT_BUDGETS)]
            entry |= {"state": policy, "budget": budgets[0]}
        body = self._build_body(random, entry, len(budgets), turns, stream)
        if kind == "bad":
            return Request(kind, body, 400, {"autoprune_requests_refused_total": 1})
        before = self.tokens * len(budgets)
        after = sum(min(budget, self.tokens) for budget in budgets)
        recalled = min(turns * recall, before - after)
        core = self._count_core(policy, budgets[0]) if policy in _SPLIT_STATES else 0
        counts = {
            f"autoprune_requests_total {policy}": 1,
            f"autoprune_images_total {keep}": len(budgets),
            "autoprune_visual_tokens_total before": before,
            "autoprune_visual_tokens_total after": after + recalled,
            "autoprune_core_tokens_total": core,
            "autoprune_recalled_tokens_total": recalled,
            "autoprune_kv_bytes_saved_total": (before - after - recalled) * self.kv_bytes,
        }
        return Request(kind, body, 200, counts)

    def _build_body(
        self, random: Random, entry: Mapping[str, object], images: int, turns: int, stream: bool
    ) -> bytes:
        urls = []
        for _ in range(images):
            image, url = random.choice(_draw_repeated_pictures())
            if random.random() < 0.5:
                url = encode_picture(image.rotate(random.random() * 360))
            urls.append(url)
        messages: list[dict[str, object]] = [
            {"role": "user", "content": build_content(random.choice(_QUESTIONS), urls)}
        ]
        for _ in range(turns):
            messages.append({"role": "assistant", "content": random.choice(("red", "two", "no"))})
            messages.append({"role": "user", "content": random.choice(_QUESTIONS)})
        fields: dict[str, object] = {"ignore_eos": True, "messages": messages}
        if entry:
            fields["mm_processor_kwargs"] = {"autoprune": entry}
        if stream:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        model = random.choice((self.model, *self.adapters))
        tokens = LONG_ANSWER if stream else 4
        return build_body(model, [], tokens=tokens, stream=stream, fields=fields)

    def _count_core(self, name: str, budget: int) -> int:
        """Tokens of an image's core: up to the edge of a KV block, as the prompt has them."""
        core = load_state(name).core
        if core is None or budget >= self.tokens or not (wanted := core.tokens(budget)):
            return 0
        return align_core(self.start, SplitImage(budget, wanted, None), BLOCK)


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, SIDE, SIDE) for seed in range(_REPEATED)]
    return [(image, encode_picture(image)) for image in pictures]
