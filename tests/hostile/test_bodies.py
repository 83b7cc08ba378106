"""Mutated requests: what the drawn ones contain."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.server import Server
from tests.hostile.bodies import KINDS, Mutant, draw
from tests.hostile.conversations import draw_conversation
from tests.serving.engine import examples

SERVER = cast("Server", SimpleNamespace(model="the-model"))


def draws(count: int) -> list[Mutant]:
    asked = examples(2)
    return [draw(SERVER, asked, Random(f"0/{n}"), ("adapter",)) for n in range(count)]


def test_every_kind_is_drawn_and_repeated_by_its_seed() -> None:
    once, again = draws(150), draws(150)
    assert [one.content for one in once] == [one.content for one in again]
    assert {one.kind for one in once} - {"spoilt"} == set(KINDS)


def test_requests_go_to_the_model_and_to_its_adapters() -> None:
    models = Counter(one.stock["model"] for one in draws(60) if one.stock is not None)
    assert set(models) == {"the-model", "adapter"}
    assert all("autoprune" not in json.dumps(one.stock) for one in draws(60) if one.kind == "entry")


def test_conversations_recall_with_a_core_and_without_sound_and_mutated() -> None:
    asked, seen = examples(2), Counter[str]()
    for number in range(300):
        request: dict[str, Any] = draw_conversation(SERVER, asked, Random(number))
        json.dumps(request)
        entry = request["mm_processor_kwargs"]["autoprune"]
        messages: Any = request.get("messages")
        sound = isinstance(messages, list) and all(
            isinstance(one, dict) and isinstance(one.get("content"), list | str) and one["content"]
            for one in messages
        )
        state = entry.get("state")
        seen["core" if isinstance(state, dict) and "core" in state else "no core"] += 1
        seen["sound" if sound else "broken"] += 1
        seen["recall"] += isinstance(entry.get("recall"), int)
        seen["forged"] += "recall_turns" in entry
        seen["text"] += sound and len(messages) > 2
    assert min(seen[kind] for kind in ("core", "no core", "sound", "recall", "text")) > 90
    assert min(seen["broken"], seen["forged"]) > 20


def test_messages_that_nest_deeper_than_python_copies_are_sent_unmutated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nest(tree: dict[str, Any], random: Random) -> None:
        tree.clear()
        raise RecursionError

    monkeypatch.setattr("tests.hostile.conversations.mutate", nest)
    asked = examples(2)
    assert all(draw_conversation(SERVER, asked, Random(n)).get("messages") for n in range(60))
