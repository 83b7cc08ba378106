"""Replies of a fake mini-LLaVA server, which depend on the pruning fields of a request only."""

from __future__ import annotations

import json
from typing import Any

from tests.offline_search.endpoint import Answer, Body

N = 144
TEXT = 20


def kept(body: Body) -> int:
    """The number of visual tokens of a request."""
    pruning = body["mm_processor_kwargs"]["autoprune"]
    return N if pruning.get("enabled") is False else int(pruning["budget"])


def arm(body: Body) -> str:
    """The case of a request: full, a control, or the name of its state."""
    pruning = body["mm_processor_kwargs"]["autoprune"]
    if pruning.get("enabled") is False:
        return "full"
    keep = str(pruning.get("keep", ""))
    return keep or str(pruning["state"]["name"])


def reply(
    body: Body, *, right: bool = True, following: str = "", tokens: int | None = None
) -> Answer:
    """A reply with the log-probability of the reference answer and one generated token."""
    answer = str(body["messages"][-1]["content"])
    token: dict[str, Any] = {
        "logprob": -0.1 if right else -3.0, "rank": 1 if right else 2, "decoded_token": answer
    }  # fmt: skip
    content = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": following}}],
        "usage": {"prompt_tokens": TEXT + (kept(body) if tokens is None else tokens)},
        "prompt_logprobs": [None, {"7": token}],
    }
    return 200, json.dumps(content).encode(), {}


def answering(body: Body, number: int) -> Answer:
    """A right answer with all tokens or with a state, a wrong one with random tokens."""
    return reply(body, right=arm(body) != "random")
