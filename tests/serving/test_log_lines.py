"""What a server logs does not grow with its traffic."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.server import Server
from tests.serving.engine import examples
from tests.serving.http import body, budget
from tests.tpdsl.samples import edited, sample

pytestmark = pytest.mark.engine

ROUNDS = 12
_VLLM = re.compile(r'HTTP/1\.1" \d{3}|Engine \d{3}: |\[loggers\.py')
"""vLLM's own: uvicorn's line a request, and its figures every ten seconds."""


def _send_kinds(server: Server, number: int) -> list[int]:
    """Statuses of one request of every kind; states and unknown names differ by number."""
    questions = examples(4)
    example = questions[number % len(questions)]
    weight = f"{(number + 1) / 100:.2f}"
    own = edited(sample(), {"/scoring/signals/0/weight": float(weight), "/name": f"own-{number}"})
    bad = edited(sample(), {"/name": f"bad-{number}", "/base_policy/name": f"none-{number}"})
    entries: list[Any] = [
        {"budget": 8 + number},
        {"keep": "random", "budget": 8},
        {"enabled": False},
        {"state": own, "budget": 24},
        {"state": "visionzip", "budget": 16},
        {"recall": 4},
        {"state": bad},
        {f"unknown-{number}": 1},
        {"budget": 0},
    ]
    sent = [
        body(server, example, max_tokens=1, mm_processor_kwargs={"autoprune": entry})
        for entry in entries
    ]
    sent.append(body(server, example, max_tokens=1, **budget(f"word-{number}")))
    return [server.post("/v1/chat/completions", one)[0] for one in sent]


def test_a_shared_budget_over_turns_is_warned_of_once(pruned: Server) -> None:
    """Only of images in several turns, where each new one moves the K of all others."""
    sent: list[Any] = [body(pruned, example, max_tokens=1) for example in examples(2)]
    (first,), (second,) = sent[0]["messages"], sent[-1]["messages"]
    both = {"role": "user", "content": first["content"] + second["content"]}
    talk = [first, {"role": "assistant", "content": "red"}, second]
    warnings = []
    for messages, asked in (
        ([both], {"shared": 40}),
        ([first], {"shared": 40}),
        (talk, 20),
        (talk, [20, 20]),
        (talk, {"shared": 40}),
        (talk, {"shared": 40}),
    ):
        request = {**sent[0], "messages": messages, **budget(asked)}
        assert pruned.post("/v1/chat/completions", request)[0] == 200
        lines = pruned.logged().splitlines()
        warnings.append(sum('"shared": K' in line and '"budget": K' in line for line in lines))
    assert warnings == [0, 0, 0, 0, 1, 1]


def test_requests_add_no_lines(pruned: Server) -> None:
    statuses = _send_kinds(pruned, 0)
    assert statuses == [200] * 6 + [400] * 4
    before = len(pruned.logged().splitlines())
    for number in range(1, ROUNDS):
        assert _send_kinds(pruned, number) == statuses
    added = pruned.logged().splitlines()[before:]
    assert sum('HTTP/1.1" ' in line for line in added) == len(statuses) * (ROUNDS - 1)
    assert [line for line in added if not _VLLM.search(line)] == []
