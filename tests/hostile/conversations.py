"""Conversations that recall tokens of images with and without a core, and mutations of them."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example
from tests.fuzz.generator import ODD_NUMBERS, ODD_TEXTS, mutate
from tests.hostile.attacks.texts import SPECIAL
from tests.serving.http import body
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.api.request import REQUEST_FIELD

CORES: Sequence[Mapping[str, object]] = (
    {"share": 0.5},
    {"share": 0.9, "policy": {"name": "divprune"}},
    {"share": 0.75, "cover": 0.5, "strength": 0.25},
    {"share": 1.0},
)
_BUDGETS = (32, 48, 64)
"""Budgets at which a core reaches the edge of a KV block, so that an image is split."""

_RECALLS = (1, 4, 8, 24, 144, 4096)
_TURNS = (1, 1, 2, 2, 3, 6, 40)
_ROLES = ("user", "assistant", "system", "tool", "developer", "", None, 1)

Request = dict[str, Any]


def draw_conversation(server: Server, examples: Sequence[Example], random: Random) -> Request:
    """A conversation with up to two mutations of its messages or its entry; often none."""
    request: Request = body(server, random.choice(examples), max_tokens=1)
    messages = request["messages"]
    for _ in range(random.choice(_TURNS)):
        messages.append({"role": "assistant", "content": "red"})
        messages.append(_draw_turn(server, examples, random))
    entry: dict[str, object] = {"recall": random.choice(_RECALLS)}
    if random.random() < 0.6:
        state = {**sample(), "core": copy.deepcopy(random.choice(CORES))}
        entry |= {"state": state, "budget": random.choice(_BUDGETS)}
    request["mm_processor_kwargs"] = {REQUEST_FIELD: entry}
    for change in random.choices(_CHANGES, k=random.choice((0, 1, 1, 2))):
        change(request, random)
    if random.random() < 0.15:  # last: it leaves nothing to rely on
        _mutate_messages(request, random)
    return request


def _mutate_messages(request: Request, random: Random) -> None:
    """Mutate the messages as a tree; not at all where that nests deeper than Python copies."""
    tree = {"messages": copy.deepcopy(request["messages"])}
    with contextlib.suppress(RecursionError):
        mutate(tree, random)
        json.dumps(tree)
        del request["messages"]
        request |= tree


def _draw_turn(server: Server, examples: Sequence[Example], random: Random) -> Request:
    """A user turn that recalls, or one with an image of its own."""
    if random.random() < 0.2:
        shown: Request = body(server, random.choice(examples))
        return dict(shown["messages"][0])
    return {"role": "user", "content": "And what shape is it?"}


def _replace(request: Request, random: Random, **fields: object) -> None:
    """Change a random message, where an earlier mutation has left one."""
    messages = request["messages"]
    if places := [at for at, message in enumerate(messages) if isinstance(message, dict)]:
        at = random.choice(places)
        messages[at] = {**messages[at], **fields}


def _change_role(request: Request, random: Random) -> None:
    _replace(request, random, role=random.choice(_ROLES))


def _change_content(request: Request, random: Random) -> None:
    text = random.choice((*SPECIAL, *ODD_TEXTS))
    _replace(request, random, content=random.choice((text, [{"type": "text", "text": text}])))


def _empty_content(request: Request, random: Random) -> None:
    _replace(request, random, content=random.choice((None, "", [], [{}], [None], {}, 1)))


def _show_image_anywhere(request: Request, random: Random) -> None:
    """Give the content of one message, such as that of the first turn, to another."""
    shown = [
        one["content"] for one in request["messages"] if isinstance(one, dict) and "content" in one
    ]
    if shown:
        _replace(request, random, content=copy.deepcopy(shown[0]))


def _drop_message(request: Request, random: Random) -> None:
    messages = request["messages"]
    if messages:
        del messages[random.choice((0, random.randrange(len(messages))))]


def _shuffle_messages(request: Request, random: Random) -> None:
    random.shuffle(request["messages"])


def _end_with_answer(request: Request, random: Random) -> None:
    request["messages"].append({"role": "assistant", "content": "It is"})
    request["add_generation_prompt"] = random.random() < 0.5
    request["continue_final_message"] = random.random() < 0.7


def _change_recall(request: Request, random: Random) -> None:
    odd = (*ODD_NUMBERS, "4", True, None, [4], {"images": 1})
    _entry(request)["recall"] = random.choice(odd)


def _forge_turns(request: Request, random: Random) -> None:
    """Say what only the server's renderer may say: which turns recall."""
    turn = {"images": random.choice((0, 1, 2, 99, -1, 2**63)), "text": random.choice(ODD_TEXTS)}
    _entry(request)["recall_turns"] = random.choice(([], [turn], [turn] * 300, turn, None))


def _mutate_entry(request: Request, random: Random) -> None:
    entry = copy.deepcopy(_entry(request))
    with contextlib.suppress(RecursionError):
        mutate(entry, random)
        json.dumps(entry)
        request["mm_processor_kwargs"][REQUEST_FIELD] = entry


def _entry(request: Request) -> dict[str, Any]:
    entry = request["mm_processor_kwargs"][REQUEST_FIELD]
    assert isinstance(entry, dict)
    return entry


_CHANGES: Sequence[Callable[[Request, Random], None]] = (
    _change_role,
    _change_content,
    _empty_content,
    _show_image_anywhere,
    _drop_message,
    _shuffle_messages,
    _end_with_answer,
    _change_recall,
    _forge_turns,
    _mutate_entry,
)
