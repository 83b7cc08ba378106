"""Chat requests over HTTP, as an OpenAI client sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example, png_url


def body(server: Server, example: Example, **more: object) -> dict[str, Any]:
    """A chat request that asks an example's question about its image."""
    content = [
        {"type": "image_url", "image_url": {"url": png_url(example.image)}},
        {"type": "text", "text": example.question},
    ]
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 4,
        **more,
    }


def entry(**fields: object) -> dict[str, object]:
    """The part of a request that says how its images are pruned."""
    return {"mm_processor_kwargs": {"autoprune": fields}}


def budget(tokens: object) -> dict[str, object]:
    """The part of a request that asks for a budget of its own."""
    return entry(budget=tokens)


def streamed(
    server: Server, sent: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The events of a streamed answer to a chat request."""
    url = server.url + "/v1/chat/completions"
    answer = httpx.post(url, json={**sent, "stream": True}, headers=headers, timeout=300)
    lines = answer.raise_for_status().text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def ask(server: Server, example: Example, **more: object) -> dict[str, Any]:
    """The response body; fails unless the status is 200."""
    status, answer = server.post("/v1/chat/completions", body(server, example, **more))
    assert status == 200, answer
    return answer


def text_of(answer: Mapping[str, Any]) -> str:
    """The generated text."""
    return str(answer["choices"][0]["message"]["content"]).strip()


def prompt_tokens(answer: Mapping[str, Any]) -> int:
    """``usage.prompt_tokens``."""
    return int(answer["usage"]["prompt_tokens"])


def samples(server: Server) -> dict[str, float]:
    """All metrics of the plugin, by name and labels."""
    return {
        sample.name + "".join(f" {key}={sample.labels[key]}" for key in sorted(sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(server.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("autoprune_")
    }


def measure_increase(server: Server, send_requests: Callable[[], None]) -> Callable[..., float]:
    """Increase of each metric while ``send_requests`` runs."""
    before = samples(server)
    send_requests()
    after = samples(server)

    def by(name: str) -> float:
        assert name in after, sorted(after)
        return after[name] - before.get(name, 0.0)

    return by
