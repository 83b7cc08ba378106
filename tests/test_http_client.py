"""The client of a server: addresses, keys, models, metrics, retries, and what each failure says."""

from __future__ import annotations

import pytest

from benchmarks.common.fake_server import Answer, Body
from tests.offline_search.synthetic import MODELS, completion, endpoint, error, model_list
from vllm_autoprune.errors import ConfigError, EvaluationFailed
from vllm_autoprune.http_client import (
    AsyncServerClient,
    Metrics,
    RequestRefused,
    ServerClient,
    ServerLost,
    chat_with_retries,
    choose_model,
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
