"""Answers of every turn from a running server, as a chat client would ask for them.

A request of turn t has all turns before it, with the reference answers. State, K and K_r are fields
of each request, so one server started with ``--autoprune-requests shipped-states`` serves all arms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.common import BenchmarkError
from benchmarks.common.client import EMPTY, Client, build_content
from benchmarks.minillava.conversations.arms import Arm
from benchmarks.minillava.conversations.draw import Conversation
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import is_right, png_url

Message = dict[str, object]


@dataclass(frozen=True)
class ServedTurns:
    """One conversation in one arm: whether each answer is right, and the lengths of the prompts."""

    right: tuple[bool, ...]
    prompt_tokens: tuple[int | None, ...]
    cached_tokens: tuple[int | None, ...]


def build_messages(conversation: Conversation, turn: int) -> list[Message]:
    """The messages of a request for the answer of a turn, counted from 0."""
    url = png_url(conversation[0].image)
    messages: list[Message] = []
    for number, example in enumerate(conversation[: turn + 1]):
        content = build_content(example.question, [url] if number == 0 else [])
        messages.append({"role": "user", "content": content})
        if number < turn:
            messages.append({"role": "assistant", "content": example.answer})
    return messages


def pruning_fields(arm: Arm) -> dict[str, object]:
    """What a request asks of the plugin."""
    if arm.state is None:
        return {"enabled": False}
    return {"state": arm.state, "budget": arm.budget, "recall": arm.recall}


def build_request(model: str, conversation: Conversation, turn: int, arm: Arm) -> bytes:
    """The greedy chat request for the answer of a turn."""
    body = {
        "model": model,
        "messages": build_messages(conversation, turn),
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "mm_processor_kwargs": {"autoprune": pruning_fields(arm)},
    }
    return json.dumps(body).encode()


def ask_turns(client: Client, model: str, conversation: Conversation, arm: Arm) -> ServedTurns:
    """Ask all turns of a conversation in order; raises :class:`BenchmarkError` on a failure."""
    right: list[bool] = []
    prompt: list[int | None] = []
    cached: list[int | None] = []
    for turn, example in enumerate(conversation):
        record = client.send(build_request(model, conversation, turn, arm))
        if record.error not in (None, EMPTY):
            raise BenchmarkError(f"{arm.name}, turn {turn + 1}: {record.error}")
        right.append(is_right(record.text, example.answer))
        prompt.append(record.prompt_tokens)
        cached.append(record.cached_tokens)
    return ServedTurns(tuple(right), tuple(prompt), tuple(cached))


def ask_arm(
    client: Client,
    model: str,
    conversations: Sequence[Conversation],
    arm: Arm,
    concurrency: int,
    advance: Callable[[], None],
) -> list[ServedTurns]:
    """The answers of one arm, with so many conversations at once."""

    def ask(conversation: Conversation) -> ServedTurns:
        answers = ask_turns(client, model, conversation, arm)
        advance()
        return answers

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, conversations))
