"""Answers of an OpenAI-compatible endpoint, which :func:`fake_server` writes as they are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from benchmarks.common.fake_server import Answer, Body, FakeServer, fake_server

MODELS = "/v1/models"


def _answer(status: int, body: object, headers: dict[str, str] | None = None) -> Answer:
    return status, json.dumps(body).encode(), headers or {}


def completion(text: str | None, *, refusal: str = "", **fields: object) -> Answer:
    """Response with a chat completion of this text, and more fields beside its choices."""
    message = {"role": "assistant", "content": text, "refusal": refusal or None}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return _answer(200, body | {"choices": [choice], "usage": usage} | fields)


def scored(prompt: list[dict[str, Any] | None]) -> Answer:
    """Response of a served model to a request for the log-probabilities of its prompt."""
    return completion(".", prompt_logprobs=prompt)


def error(status: int, message: str = "no", **headers: str) -> Answer:
    """Error response in OpenAI's format."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return _answer(status, {"error": {"message": message, "type": "x", "code": status}}, names)


def model_list(*names: str) -> Answer:
    """Response with a list of models."""
    return _answer(200, {"object": "list", "data": [{"id": name} for name in names]})


@contextlib.contextmanager
def endpoint(answer: Callable[[Body, int], Answer]) -> Iterator[FakeServer]:
    """Serve until the block ends; ``answer`` maps a request body and its number to a response."""
    numbers = count()
    pages = {MODELS: model_list("m")}
    with fake_server(lambda body: answer(body, next(numbers)), model=None, pages=pages) as server:
        yield server
