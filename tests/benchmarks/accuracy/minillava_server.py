"""Replies of a fake mini-LLaVA server, which depend on the pruning fields of a request only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import completion


def pruning_of(body: Body) -> dict[str, Any]:
    """The pruning fields of a request."""
    fields: dict[str, Any] = body["mm_processor_kwargs"]["autoprune"]
    return fields


def kept(body: Body) -> int:
    """The number of visual tokens of a request."""
    pruning = pruning_of(body)
    return 144 if pruning.get("enabled") is False else int(pruning["budget"])


def arm(body: Body) -> str:
    """The case of a request: full, a control, or the name of its state."""
    pruning = pruning_of(body)
    if pruning.get("enabled") is False:
        return "full"
    return str(pruning.get("keep") or pruning["state"]["name"])


def reply(
    body: Body, *, right: bool = True, following: str = "", tokens: int | None = None
) -> Answer:
    """A reply with the log-probability of the reference answer and one generated token."""
    token = {"decoded_token": str(body["messages"][-1]["content"])}
    score = {"logprob": -0.1, "rank": 1} if right else {"logprob": -3.0, "rank": 2}
    usage = {"prompt_tokens": 20 + (kept(body) if tokens is None else tokens)}
    return completion(
        following, usage=usage, prompt_logprobs=[None, {"7": {**token, **score}}]
    )


def answering(body: Body, number: int) -> Answer:
    """A right answer with all tokens or with a state, a wrong one with random tokens."""
    return reply(body, right=arm(body) != "random")


def asked(requests: Sequence[Body]) -> list[Body]:
    """The questions, without the requests about a plain image that find out what is refused."""
    return [body for body in requests if len(body["messages"]) > 1]
