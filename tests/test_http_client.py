"""The client of a server: addresses, keys, models, metrics, retries, and what each failure says."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.fake_server import Answer, Body
from tests.offline_search.synthetic import MODELS, completion, endpoint, error, model_list
from vllm_autoprune.errors import ConfigError, EvaluationFailed
from vllm_autoprune.http_client import (
    EMPTY,
    AsyncServerClient,
    Metrics,
    RequestRefused,
    ServerClient,
    ServerLost,
    chat_with_retries,
    choose_model,
    parse_stream,
    reporting_failures,
    server_address,
)

PAGE = """\
# HELP images Images.
# TYPE images counter
images_total{stage="before",engine="0"} 10.0
images_total{stage="before",engine="1"} 5.0
images_total{stage="after",engine="0"} 3.0
# TYPE seconds histogram
seconds_bucket{le="+Inf"} 4.0
seconds_count 4.0
seconds_sum 6.0
info{block_size="16"} 1.0
"""


def test_metrics_are_summed_over_the_samples_with_a_label() -> None:
    metrics = Metrics(PAGE)
    earlier = Metrics('images_total{engine="0",stage="after"} 1.0\nseconds_count 1.0\n')
    gained = metrics.since(earlier)
    assert (gained.total("images_total"), gained.total("seconds_count")) == (17.0, 3.0)
    assert metrics.total("images_total") == 18.0
    assert metrics.total("images_total", stage="before") == 15.0
    assert metrics.total("images_total", stage="between") is None
    assert metrics.total("absent") is None and metrics.mean("absent") is None
    assert metrics.mean("seconds") == 1.5
    assert metrics.label("info", "block_size") == "16" and metrics.label("info", "other") is None


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1_and_the_key_is_sent(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_address(url) == "http://h:1"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with ServerClient(url) as client:
        assert client.url == "http://h:1"
        assert client.http.headers["authorization"] == "Bearer secret"


NO_ADDRESS = "is not the address of a server -> give it as http://HOST:PORT"


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ("localhost:8000", NO_ADDRESS),
        ("127.0.0.1:8000", NO_ADDRESS),
        ("http://h:port", NO_ADDRESS),
        ("http://127.0.0.1:9", "does not answer (ConnectError) -> start the server"),
        (error(401, "who are\nyou"), "status 401: who are you -> set VLLM_API_KEY"),
        (error(503, "down"), "status 503: down -> look into the server's log"),
        (error(404), "status 404: no -> give the address of a vllm serve"),
        ((200, b"<html>", {}), "answers in an unknown format"),
        ((200, b"[]", {}), "answers in an unknown format"),
        (model_list(), "lists no model"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(models: str | Answer, text: str) -> None:
    with endpoint(lambda body, number: error(500)) as server:
        url = models if isinstance(models, str) else server.url
        server.pages[MODELS] = models
        with (
            pytest.raises(ConfigError) as caught,
            reporting_failures(url),
            ServerClient(url) as client,
        ):
            client.list_models()
    (problem,) = caught.value.problems
    assert problem.where == url and text in str(problem)


def test_a_model_that_is_not_served_is_named() -> None:
    assert [choose_model("http://h", {"a": 0, "b": 0}, name) for name in (None, "b")] == ["a", "b"]
    with pytest.raises(ConfigError, match="serves a, b -> serve c, or name a served model"):
        choose_model("http://h", {"a": 0, "b": 0}, "c")


async def ask(*urls: str) -> str:
    servers = [AsyncServerClient(url, max_in_flight=1) for url in urls]
    try:
        answer = await chat_with_retries(servers, {}, attempts=3, first_wait=0.001)
    finally:
        for server in servers:
            await server.close()
    return str(answer["choices"][0]["message"]["content"])


async def test_failures_that_may_pass_are_retried_and_refusals_are_not() -> None:
    replies = [error(503), error(429), completion("yes"), completion("yes"), error(422, "never")]
    with endpoint(lambda body, number: replies[number]) as server:
        assert await ask(server.url) == "yes"
        assert await ask("http://127.0.0.1:9", server.url) == "yes"
        with pytest.raises(RequestRefused, match="422: never"):
            await ask(server.url)
        assert len(server.requests) == len(replies)


async def test_servers_that_stopped_are_told_from_a_failed_request() -> None:
    failed = pytest.raises(EvaluationFailed, match=r"JSONDecodeError.*, after 3 attempts")
    with endpoint(lambda body, number: (200, b"no JSON", {})) as server, failed:
        await ask(server.url)

    def dying(body: Body, number: int) -> Answer:
        server.pages[MODELS] = error(503, "down")
        return error(500)

    with endpoint(dying) as server, pytest.raises(ServerLost, match="stopped answering"):
        await ask(server.url)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**fields: str) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


ROLE, A, B = delta(role="assistant", content=""), delta(content="a"), delta(content="b")
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reads", "deltas", "text", "error"),
    [
        # The chunk that only names the role is no first token.
        ([(1.0, ROLE), (2.0, A), (3.0, B), (4.0, USAGE), (5.0, DONE)], (2.0, 3.0), "ab", None),
        # An event that is cut in two has the time of its last byte; two in one read have one time.
        *([[(1.0, A[:cut]), (2.0, A[cut:] + DONE)], (2.0,), "a", None] for cut in range(1, 60, 9)),
        ([(1.0, ROLE + A + B), (2.0, USAGE + DONE)], (1.0, 1.0), "ab", None),
        # Reasoning is no text of the answer, and its first token is the first token.
        ([(1.0, delta(reasoning_content="hm")), (2.0, A + DONE)], (1.0, 2.0), "a", None),
        # Comments, and line ends of the other kind.
        ([(1.0, b": ping\r\n\r\n" + A.replace(b"\n", b"\r\n") + DONE)], (1.0,), "a", None),
        ([(1.0, A)], (1.0,), "a", "the answer was cut short: the stream ended without [DONE]"),
        ([(1.0, DONE)], (), "", EMPTY),
        ([(1.0, event(error={"message": "engine is dead"}))], (), "", "engine is dead"),
        ([(1.0, b"data: {oops\n\n")], (), "", "an event is not a JSON object: {oops"),
        ([(1.0, b"data: [1]\n\n")], (), "", "an event is not a JSON object: [1]"),
    ],
)
def test_a_stream_is_parsed(
    reads: list[tuple[float, bytes]], deltas: tuple[float, ...], text: str, error: str | None
) -> None:
    usage = (9, 2) if any(USAGE in piece for _, piece in reads) else (None, None)
    assert tuple(parse_stream(reads)) == (deltas, text, *usage, error)
