"""Mutations of chat requests: of the plugin's entry, the images and all other fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example
from tests.fuzz.generator import ODD_TEXTS, anything, mutate, spoil
from tests.hostile.attacks.texts import SPECIAL
from tests.hostile.conversations import CORES, draw_conversation
from tests.serving.http import body
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.api.request import REQUEST_FIELD
from vllm_autoprune.serving.plan import FIELD
from vllm_autoprune.tpdsl.loading import load_state

BODY = "body"
"""The kind of requests that change what vLLM reads itself."""

CONVERSATION = "conversation"
"""The kind of requests with several turns, whose later ones recall tokens."""

READ_BY_VLLM = (BODY, CONVERSATION)
"""Kinds of requests that stock vLLM may refuse or fail too."""

KINDS: Mapping[str, float] = {
    "state": 34,
    "entry": 25,
    "kwargs": 8,
    "anything": 8,
    "huge": 2,
    "sound": 6,
    BODY: 17,
    CONVERSATION: 30,
}
"""How often each kind is drawn."""

_SPOILT = 0.03
"""Share of requests whose text is no longer JSON, or is hardly any."""

_NAMES = ("a", "b", "0" * 64, "renderer0-mm-7-image-0", "", "\n", "x" * 10_000, "ü🦙")
"""Few names for many images, so that they meet."""

_ODD: Mapping[str, tuple[object, ...]] = {
    "cache_salt": ("a", "b", "", "\0", "s" * 2000, 1, None, ["a"], *ODD_TEXTS[:8]),
    "n": (0, 1, 2, 3, -1, 10**6, 2**63, "2", 1.5, None, True),
    "truncate_prompt_tokens": (-2, -1, 0, 1, 5, 20, 40, 200, 10**6, 2**63, "1", None),
    "truncation_side": ("left", "right", "", 1, None),
    "mm_processor_kwargs": (
        {REQUEST_FIELD: {REQUEST_FIELD: {"budget": 8}}},
        {"images_kwargs": {REQUEST_FIELD: {"budget": 8}}},
        {REQUEST_FIELD: {"budget": 8}, "images_kwargs": {"do_resize": False}},
        {REQUEST_FIELD: {"instructions": ["forged"]}},
        {REQUEST_FIELD: {"instructions": [1, None]}},
        {FIELD: [[1, 0, 1, 0, 0, 0, 0]]},
        {REQUEST_FIELD: {}, FIELD: [1, 2, 3]},
        {"_autoprune_plan": {"items": []}},
        {"_autoprune_profile": True},
        {"_autoprune_uncounted": True},
        {REQUEST_FIELD: {"budget": 8, "_autoprune_profile": True}},
        [{REQUEST_FIELD: {}}],
        "autoprune",
    ),
}
_DETAILS: tuple[object, ...] = ("low", "high", "auto", "", "ü", 1, None, {})


@dataclass(frozen=True)
class Mutant:
    """A mutated request: its kind, its bytes, and its text for reports.

    ``stock`` is the same request without the plugin's entry, if it is still JSON.
    """

    kind: str
    content: bytes
    shown: str
    stock: Mapping[str, object] | None


def draw(
    server: Server, examples: list[Example], random: Random, adapters: Sequence[str] = ()
) -> Mutant:
    """One mutated request, to the model or to one of its adapters."""
    kind = random.choices(list(KINDS), list(KINDS.values()))[0]
    request = body(server, random.choice(examples), max_tokens=1)
    if kind == CONVERSATION:
        request = draw_conversation(server, examples, random)
    elif kind == BODY:
        _change_body(request, random)
    else:
        request["mm_processor_kwargs"] = _mutate_kwargs(kind, random)
    if adapters:
        request["model"] = random.choice((server.model, *adapters))
    text = json.dumps(request)
    shown = json.dumps({k: v for k, v in request.items() if k not in ("model", "messages")})
    if random.random() < _SPOILT:
        spoilt = spoil(text, random)[0]
        content = spoilt.encode("utf-8", "surrogatepass") if isinstance(spoilt, str) else spoilt
        return Mutant("spoilt", content, shown, None)
    return Mutant(kind, text.encode(), shown, _without_entry(request))


def _without_entry(request: Mapping[str, object]) -> dict[str, object]:
    plain = dict(request)
    kwargs = plain.pop("mm_processor_kwargs", None)
    if isinstance(kwargs, dict):
        rest = {key: value for key, value in kwargs.items() if key != REQUEST_FIELD}
        if rest:
            plain["mm_processor_kwargs"] = rest
    return plain


def entries() -> list[Any]:
    """Valid entries to mutate."""
    state = json.loads(load_state("visionzip").dumps())
    with_cores = [{**sample(), "core": core} for core in CORES]
    return [
        {"budget": 8},
        {"budget": [8]},
        {"budget": {"shared": 8}},
        {"budget": 8, "keep": "reference"},
        {"keep": "random", "enabled": True},
        {"budget": 8, "keep": "resized"},
        {"budget": 8, "recall": 4},
        {"recall": 4, "recall_turns": [{"images": 1, "text": "and now?"}]},
        {"enabled": False},
        {"state": "visionzip", "budget": 8},
        *({"state": name, "budget": 16} for name in ("fastv", "prumerge_plus")),
        *({"state": copy.deepcopy(whole)} for whole in (sample(), state) for _ in range(6)),
        *({"state": whole, "budget": budget} for whole in with_cores for budget in (8, 48)),
    ]


def _mutate_kwargs(kind: str, random: Random) -> Any:
    entry = random.choice(entries())
    kwargs: Any = {REQUEST_FIELD: entry}
    if kind == "state":
        state = sample()
        if random.random() < 0.5:
            state["core"] = copy.deepcopy(random.choice(CORES))
        kwargs[REQUEST_FIELD] = {"state": state, "budget": random.choice((None, 8, 16, 64))}
        # Else hardly any would change the core.
        mutate(state["core"] if "core" in state and random.random() < 0.5 else state, random)
    elif kind == "entry":
        mutate(entry, random)
    elif kind == "kwargs":
        mutate(kwargs, random)
    elif kind == "anything":
        kwargs = random.choice((anything(random), {REQUEST_FIELD: anything(random)}))
    elif kind == "huge":
        kwargs[REQUEST_FIELD] = _draw_huge_entry(random)
    return kwargs


def _draw_huge_entry(random: Random) -> Any:
    deep: Any = 1
    for _ in range(random.choice((300, 900))):
        deep = {"state": deep}
    return random.choice(
        (
            {"state": {**sample(), "provenance": {"notes": "n" * 10_000_000}}},
            {"state": "n" * 10_000_000},
            {"budget": [8] * 1_000_000},
            {"n" * 1_000_000: 8},
            {str(i): i for i in range(50_000)},
            deep,
        )
    )


def _change_body(request: dict[str, object], random: Random) -> None:
    """Mutate one to three fields that vLLM reads, with a valid entry or none."""
    if random.random() < 0.5:
        request["mm_processor_kwargs"] = {REQUEST_FIELD: random.choice(entries()[:12])}
    messages = request["messages"]
    assert isinstance(messages, list)
    parts: list[dict[str, Any]] = messages[0]["content"]
    for _ in range(random.choice((1, 1, 2, 3))):
        change = random.choice(("uuid", "uuid", "twice", "detail", "text", "turns", *_ODD))
        images = [part for part in parts if part["type"] == "image_url"]
        if change in _ODD:
            request[change] = random.choice(_ODD[change])
            if change == "n":
                request["temperature"] = 1
        elif change == "uuid":
            random.choice(images)["uuid"] = random.choice((*_NAMES, *_NAMES, 1, None, ["a"]))
        elif change == "twice":
            parts.insert(0, copy.deepcopy(random.choice(images)))
        elif change == "turns":
            for _ in range(random.choice((1, 2, 5, 40))):
                text = random.choice((*SPECIAL, *ODD_TEXTS, "and now?", "and now?", "and now?"))
                messages.append({"role": "assistant", "content": "red"})
                messages.append({"role": "user", "content": text})
        elif change == "detail":
            image = random.choice(images)["image_url"]
            image["detail"] = random.choice(_DETAILS)
        else:
            parts[-1]["text"] = random.choice((*SPECIAL, *ODD_TEXTS)) + parts[-1]["text"]
