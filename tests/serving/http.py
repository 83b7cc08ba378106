"""Chat requests over HTTP, as an OpenAI client sends them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

from benchmarks.minillava.split import Example, png
from benchmarks.server import Server


def body(server: Server, example: Example, **more: object) -> dict[str, object]:
    """A chat request that asks an example's question about its image."""
    url = "data:image/png;base64," + base64.b64encode(png(example.image)).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": example.question},
    ]
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 4,
        **more,
    }


def budget(tokens: object) -> dict[str, object]:
    """The part of a request that asks for a budget of its own."""
    return {"mm_processor_kwargs": {"autoprune": {"budget": tokens}}}


def ask(server: Server, example: Example, **more: object) -> dict[str, Any]:
    """The response body; fails unless the status is 200."""
    status, answer = server.post("/v1/chat/completions", body(server, example, **more))
    assert status == 200, answer
    return cast("dict[str, Any]", answer)


def text_of(answer: Mapping[str, Any]) -> str:
    """The generated text."""
    return str(answer["choices"][0]["message"]["content"]).strip()


def prompt_tokens(answer: Mapping[str, Any]) -> int:
    """``usage.prompt_tokens``."""
    return int(answer["usage"]["prompt_tokens"])


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Prompt tokens from the prefix cache."""
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
