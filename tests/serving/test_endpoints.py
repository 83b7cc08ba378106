"""Endpoints and forms of answers about pruned images, over HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.server import Server
from benchmarks.yardsticks.examples import draw_examples
from tests.serving.engine import examples
from tests.serving.http import (
    agent_chat,
    agent_messages,
    agent_responses,
    ask,
    body,
    prompt_tokens,
    text_of,
)

pytestmark = pytest.mark.engine


def streamed(
    server: Server, sent: dict[str, object], headers: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        data=json.dumps({**sent, "stream": True}).encode(),
        headers={"Content-Type": "application/json", "Connection": "close", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_streamed_answer_is_the_whole_one(pruned: Server) -> None:
    for example in examples(2)[:4]:
        whole = ask(pruned, example)
        usage = {"stream_options": {"include_usage": True}}
        events = streamed(pruned, body(pruned, example, **usage))
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text.strip() == text_of(whole)
        assert events[-1]["usage"]["prompt_tokens"] == prompt_tokens(whole)


def test_samples_of_one_request(pruned: Server) -> None:
    example = examples(1)[0]
    sampled = {"n": 3, "temperature": 1.0, "seed": 7}
    first, second = (ask(pruned, example, **sampled) for _ in range(2))
    assert len(first["choices"]) == 3
    assert prompt_tokens(first) == prompt_tokens(ask(pruned, example))
    texts = [
        [choice["message"]["content"] for choice in answer["choices"]] for answer in (first, second)
    ]
    assert texts[0] == texts[1]


def test_responses_endpoint(pruned: Server) -> None:
    for example in examples(2)[:4]:
        whole = ask(pruned, example)
        chat: Any = body(pruned, example)
        image, text = chat["messages"][0]["content"]
        content = [
            {"type": "input_image", "detail": "auto", "image_url": image["image_url"]["url"]},
            {"type": "input_text", "text": text["text"]},
        ]
        sent = {
            "model": pruned.model,
            "input": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_output_tokens": 16,
            "store": False,
        }
        status, answer = pruned.post("/v1/responses", sent)
        assert status == 200, answer
        reply: Any = answer
        assert reply["usage"]["input_tokens"] == prompt_tokens(whole)
        said = [part["text"] for item in reply["output"] for part in item.get("content") or []]
        assert "".join(said).strip() == text_of(ask(pruned, example, max_tokens=16))


TURNS, BLOCK = 20, 32


@pytest.mark.parametrize(
    ("path", "sent", "prefix"),
    [
        ("/v1/chat/completions", agent_chat, "prompt_tokens"),
        ("/v1/responses", agent_responses, "input_tokens"),
        ("/v1/messages", agent_messages, "input_tokens"),
    ],
)
def test_screenshots_of_an_agent_stay_in_the_prefix_cache(
    pruned: Server, path: str, sent: Callable[..., dict[str, object]], prefix: str
) -> None:
    images = {example.image_id: example for example in draw_examples("test", TURNS)}
    chats: list[Any] = [body(pruned, example)["messages"] for example in images.values()]
    urls = [chat[0]["content"][0]["image_url"]["url"] for chat in chats]
    before = 0
    for turns in range(1, TURNS + 1):
        request = sent(f"How many shapes, by {path}?", urls[:turns])
        status, answer = pruned.post(path, {"model": pruned.model, **request})
        assert status == 200, answer
        usage: Any = answer["usage"]
        cached = usage.get(f"{prefix}_details", {}).get("cached_tokens") or 0
        # Anthropic's input tokens are those that were neither read from a cache nor written to one.
        cached += usage.get("cache_read_input_tokens", 0)
        tokens = usage[prefix] + usage.get("cache_read_input_tokens", 0)
        tokens += usage.get("cache_creation_input_tokens", 0)
        # The last token of a prompt may be another one where the answer follows.
        assert cached >= (before - 1) // BLOCK * BLOCK
        assert tokens > before + 32
        before = tokens


def test_completions_take_text_as_stock_does(stock: Server, pruned: Server) -> None:
    sent = {"prompt": "USER: Which shape is red? ASSISTANT:", "max_tokens": 6, "temperature": 0}
    (first, status), (second, _) = (
        (server.post("/v1/completions", {"model": server.model, **sent})[::-1])
        for server in (stock, pruned)
    )
    assert status == 200
    choices: list[Any] = [first["choices"], second["choices"]]
    assert choices[0][0]["text"] == choices[1][0]["text"]
