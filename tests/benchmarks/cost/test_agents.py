"""Conversations of screenshots, with a server that only counts."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.cost.agents import _converse


class _Server:
    """Records each request, and reports its messages as tokens, half of them cached."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def post(self, path: str, body: Any) -> Any:
        self.bodies.append(copy.deepcopy(body))
        count = len(body["messages"])
        details = {"cached_tokens": count // 2}
        usage = {"prompt_tokens": count, "prompt_tokens_details": details}
        return 200, {"usage": usage, "choices": [{"message": {"content": "red"}}]}


def test_a_client_drops_old_screenshots_and_a_server_is_told_its_rule() -> None:
    server: Any = _Server()
    assert _converse(server, [*"abc"], 2) == [(2, 1), (4, 2), (6, 3)]
    last = server.bodies[-1]["messages"]
    assert [len(message["content"]) for message in last[1::2]] == [1, 2, 2]
    assert "mm_processor_kwargs" not in server.bodies[-1]
    entry = {"history": "1:128"}
    _converse(server, [*"abc"], entry)
    assert server.bodies[-1]["mm_processor_kwargs"] == {"autoprune": entry}
    last = server.bodies[-1]["messages"]
    assert [len(message["content"]) for message in last[1::2]] == [2, 2, 2]
