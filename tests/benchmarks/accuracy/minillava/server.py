"""A server that answers as mini-LLaVA's would, by rules that tests know.

Knows nothing about images: what a request says about pruning decides.
"""

from __future__ import annotations

import json
from typing import Any

from tests.offline_search.endpoint import Answer, Body

N = 144
TEXT = 20


def kept(body: Body) -> int:
    """K of a request."""
    asked = body["mm_processor_kwargs"]["autoprune"]
    return N if asked.get("enabled") is False else int(asked["budget"])


def arm(body: Body) -> str:
    """Which case a request is of: full, random, or the name of a state."""
    asked = body["mm_processor_kwargs"]["autoprune"]
    if asked.get("enabled") is False:
        return "full"
    return "random" if asked.get("keep") == "random" else str(asked["policy"]["name"])


def reply(body: Body, *, right: bool = True, after: str = "", tokens: int | None = None) -> Answer:
    """The reference answer read from the prompt, and one token more."""
    answer = str(body["messages"][-1]["content"])
    token: dict[str, Any] = {
        "logprob": -0.1 if right else -3.0, "rank": 1 if right else 2, "decoded_token": answer
    }  # fmt: skip
    said = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": after}}],
        "usage": {"prompt_tokens": TEXT + (kept(body) if tokens is None else tokens)},
        "prompt_logprobs": [None, {"7": token}],
    }
    return 200, json.dumps(said).encode(), {}


def answering(body: Body, number: int) -> Answer:
    """Right with all tokens or with a state; wrong with random ones."""
    return reply(body, right=arm(body) != "random")
