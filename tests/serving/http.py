"""Chat requests over HTTP, as an OpenAI client sends them, and what the metrics say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.requests import build_content
from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example
from vllm_autoprune.http_client import CHAT


def body(server: Server, example: Example, **more: object) -> dict[str, Any]:
    """A chat request that asks an example's question about its image."""
    content = build_content(example.question, [example.png_url])
    turn = {"role": "user", "content": content}
    sampling = {"temperature": 0, "max_tokens": 4}
    return {"model": server.model, "messages": [turn], **sampling, **more}


def entry(**fields: object) -> dict[str, Any]:
    """The part of a request that says how its images are pruned."""
    return {"mm_processor_kwargs": {"autoprune": fields}}


def ask(server: Server, example: Example, **more: object) -> dict[str, Any]:
    """The response body; fails unless the status is 200."""
    status, answer = server.post(CHAT, body(server, example, **more))
    assert status == 200, answer
    return answer


def text_of(answer: Mapping[str, Any]) -> str:
    """The generated text."""
    return str(answer["choices"][0]["message"]["content"]).strip()


def prompt_tokens(answer: Mapping[str, Any]) -> int:
    """``usage.prompt_tokens``."""
    return int(answer["usage"]["prompt_tokens"])


def samples(server: Server) -> dict[str, float]:
    """All metrics of the plugin, by name and labels without ``autoprune_`` and ``_total``."""
    return {
        sample.name.removeprefix("autoprune_").removesuffix("_total")
        + "".join(
            f" {key}={sample.labels[key]}" for key in sorted(sample.labels)
        ): sample.value
        for family in text_string_to_metric_families(server.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("autoprune_")
    }


def assert_grows(
    server: Server, send_requests: Callable[[], object], expected: Mapping[str, float]
) -> dict[str, float]:
    """By how much each of :func:`samples` grows; fails where not as expected."""
    earlier = samples(server)
    send_requests()
    grown = {
        name: value - earlier.get(name, 0.0) for name, value in samples(server).items()
    }
    assert {name: grown[name] for name in expected} == dict(expected)
    return grown
