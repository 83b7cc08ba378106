"""Parts of the demo's requests, and the prompt length of a fake answer."""

from __future__ import annotations

from benchmarks.common.fake_server import Body

TEXT_TOKENS = 20


def pruning(body: Body) -> dict[str, object]:
    """The pruning fields of a request."""
    return dict(body.get("mm_processor_kwargs", {}).get("autoprune", {}))


def question_of(body: Body) -> str:
    """The question of a request."""
    return str(body["messages"][0]["content"][1]["text"])


def image_of(body: Body) -> str:
    """The identity of the image of a request."""
    return str(body["messages"][0]["content"][0]["uuid"])


def prompt_tokens(body: Body) -> int:
    """Tokens of the prompt, with the kept visual tokens."""
    return TEXT_TOKENS + int(str(pruning(body).get("budget", 144)))
