"""The client of a server: addresses, keys, models, metrics, retries, and what each failure says."""

from __future__ import annotations

import json
import time
from email.utils import formatdate

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.fake_server import Answer, Body, fake_server
from tests.offline_search.synthetic import MODELS, completion, endpoint, error, model_list
from vllm_autoprune.errors import ConfigError, EvaluationFailed
from vllm_autoprune.http_client import (
    FAILURES,
    AsyncServerClient,
    Failures,
    Metrics,
    RequestRefused,
    ServerClient,
    ServerLost,
    _describe_error,
    _read_answer,
    _read_models,
    chat_with_retries,
    choose_model,
    reporting_failures,
)

Printed = pytest.CaptureFixture[str]
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


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ("http://127.0.0.1:9", "does not answer (ConnectError: [Errno 111] Connection refused)"),
        (error(401, "who are\nyou"), "status 401: who are you -> give the key"),
        (error(404), "status 404: no -> give the address of a vllm serve"),
        (error(418, "tea"), "status 418: tea -> look into the server's log"),
        ((404, b'{"detail": "Not Found"}', {}), "status 404: Not Found -> "),
        ((404, b'{"error": "no route"}', {}), "status 404: no route -> "),
        ((502, b"<html><style>b {}</style><h1>Bad\ngateway</h1>", {}), "status 502: Bad gateway"),
        ((403, b"", {}), "status 403: no text -> give the key"),
        ((418, b'{"error": "\\u001b[31m\\ud83d"}', {}), "status 418: [31m -> look into"),
        ((418, b"\0\0", {"Content-Type": "text/html; charset=utf-16"}), "status 418: no text"),
        ((307, b"", {"Location": "/openai/v1/models"}), "/openai -> give that address"),
        ((301, b"", {"Location": "https://h/v1/models"}), "redirects to https://h -> give"),
        ((200, b"<html>log in</html>", {"Content-Type": "text/html"}),
         "in an unknown format (no JSON object but text/html: <html>log in</html>)"),
        ((200, b"", {}), "no JSON object but application/json: nothing"),
        ((200, b"[]", {}), "no JSON object but application/json: []"),
        ((200, b'{"data": [{"id": "m"', {}), 'no JSON object but application/json: {"data": ['),
        ((200, b'{"data": [{"name": "m"}]}', {}), "no list of models: {"),
        ((200, b'{"data": ["m"]}', {}), "no list of models: {"),
        ((200, b'{"data": 7}', {}), "no list of models: {"),
        ((200, b"[" * 100_000, {}), "no JSON object but application/json: [[["),
        ((200, b'{"error": {"message": "no credit"}}', {}), "status 200 with an error: no credit"),
        ((200, b"{}", {"Content-Encoding": "gzip"}), "a body that is not encoded as its headers"),
        ((200, b"\xff\xfe\xfa", {}), "no JSON object but application/json"),
        (model_list(), "lists no model"),
    ],
)  # fmt: skip
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
    assert problem.where == url and text in str(problem) and "\n" not in str(problem)


@pytest.mark.parametrize(
    ("header", "wait"),
    [
        ("2", 2.0), ("0.5", 0.5), ("+30", 30.0),
        ("3600", 60.0), ("inf", 60.0), ("+90000", 60.0),
        *((text, 7.0) for text in ("", "nan", "-5", "0", "soon", "-inf", "1e", "2020-01-01",
                                   formatdate(0, usegmt=True), "Thu, 99 Foo 2026 00:00:00 GMT")),
    ],
)  # fmt: skip
def test_a_server_says_how_long_to_wait(header: str, wait: float, capsys: Printed) -> None:
    if header.startswith("+"):
        header = formatdate(time.time() + float(header), usegmt=True)
    with endpoint(lambda body, number: error(429, **{"Retry-After": header})) as server:
        response = httpx.post(server.url, json={})
    failures = Failures(server.url)
    refused = httpx.HTTPStatusError("", request=response.request, response=response)
    assert failures.wait(refused, 7.0) == pytest.approx(wait, abs=2)
    failures.wait(refused, 7.0)
    failures.report()
    said = [line.removeprefix(server.url) for line in capsys.readouterr().err.splitlines()]
    assert said[-1] == " limited this run: 2 x status 429, asked again"
    assert len(said) == 1 + (wait >= 30.0), "a long wait is said once"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 529])
def test_the_first_question_is_asked_again(status: int, capsys: Printed) -> None:
    answers = iter([error(status, **{"Retry-After": "0.01"}), model_list("m")])
    with fake_server(pages={MODELS: model_list("m")}) as server:
        server.pages[MODELS] = lambda: next(answers)
        with ServerClient(server.url) as client:
            assert client.list_models() == {"m": 0}
    assert f"limited this run: 1 x status {status}" in capsys.readouterr().err


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(
        st.sampled_from(["data", "id", "max_model_len", "error", "message", "detail", "choices"]),
        values, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.sampled_from([200, 201, 204, 302, 400, 404, 429, 500, 599]),
    st.binary(max_size=40) | _JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["application/json", "text/html; charset=utf-16", "text/event-stream", ";"]),
)
def test_any_answer_is_read_or_said_in_one_line(status: int, content: bytes, kind: str) -> None:
    response = httpx.Response(
        status, content=content, headers={"Content-Type": kind}, request=httpx.Request("GET", "h:")
    )
    for read in (_read_models, _read_answer):
        line = "read"
        try:
            read(response)
        except RequestRefused as refusal:
            line = str(refusal)
        except FAILURES as failure:
            line = _describe_error(failure)
        assert line.isprintable() and len(line) < 500


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
    failed = pytest.raises(
        EvaluationFailed,
        match="an unknown format: no JSON object but application/json: no JSON, after 3",
    )
    with endpoint(lambda body, number: (200, b"no JSON", {})) as server, failed:
        await ask(server.url)

    def dying(body: Body, number: int) -> Answer:
        server.pages[MODELS] = error(503, "down")
        return error(500)

    with endpoint(dying) as server, pytest.raises(ServerLost, match="stopped answering"):
        await ask(server.url)
