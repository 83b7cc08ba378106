from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common.fake_server import Answer, Body, FakeServer
from offline_search.components import JsonObject
from offline_search.prompt import Messages
from offline_search.proposer import EndpointProposer, EndpointSettings, Reply
from tests.offline_search.endpoint import completion, endpoint, error
from vllm_autoprune.errors import ConfigError

HELLO: Messages = ({"role": "user", "content": "hello"},)
SCHEMA: JsonObject = {"type": "object"}
Answering = Callable[[Body, int], Answer]


def fast_settings(server: FakeServer, **changes: object) -> EndpointSettings:
    fast: dict[str, Any] = {"retries": 3, "timeout": 2.0, **changes}
    return EndpointSettings(f"{server.url}/v1", "m", **fast)


async def replies_to(settings: EndpointSettings, *seeds: int) -> list[Reply]:
    """Replies to one request after another."""
    proposer = EndpointProposer(settings)
    try:
        return [await proposer.reply(HELLO, SCHEMA, seed) for seed in seeds or (7,)]
    finally:
        await proposer.close()


async def prepare(settings: EndpointSettings) -> None:
    proposer = EndpointProposer(settings)
    try:
        await proposer.prepare()
    finally:
        await proposer.close()


async def test_a_reply_has_text_and_cost() -> None:
    with endpoint(lambda body, n: completion("{}")) as server:
        changes = {"price": (1e6, 2e6), "temperature": 0.5, "reply_tokens": 99}
        (reply,) = await replies_to(fast_settings(server, **changes))
        await replies_to(fast_settings(server, seeded=False))
    assert (reply.text, reply.failure) == ("{}", "")
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == (10, 5)
    assert reply.cost.money == 20.0
    seeded, unseeded = server.requests
    assert seeded["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (seeded["seed"], seeded["temperature"], seeded["max_tokens"]) == (7, 0.5, 99)
    assert "seed" not in unseeded


def fail_first(status: int, times: int = 1, **headers: str) -> Answering:
    """An endpoint whose first answers are errors."""
    return lambda body, n: completion("{}") if n >= times else error(status, "busy", **headers)


@pytest.mark.parametrize(
    ("answer", "sent", "failure"),
    [
        *((fail_first(status, 2, retry_after_ms="5"), 3, "") for status in (429, 500, 503, 408)),
        (fail_first(503, 99, retry_after_ms="5"), 4, "after at most 3 retries"),
        *((fail_first(status, 99), 1, "busy") for status in (401, 403, 404)),
        (fail_first(429, 99, retry_after="1000"), 0, "RateLimitError"),
        (fail_first(400, 99), 2, "busy"),  # with the schema and without it
        (lambda body, n: completion(None, refusal="I will not."), 1, ""),
    ],
    ids=["429", "500", "503", "408", "always 503", "401", "403", "404", "long", "400", "refusal"],
)
async def test_what_may_pass_is_retried_and_what_remains_is_reported(
    answer: Answering, sent: int, failure: str
) -> None:
    with endpoint(answer) as server:
        (reply,) = await replies_to(fast_settings(server))
    assert failure in reply.failure and (reply.text is None) == bool(failure)
    assert len(server.requests) == sent or not sent
    assert reply.text in (None, "{}", "I will not."), "a refusal is a reply to repair"


async def test_retry_after_is_waited_for() -> None:
    start = time.monotonic()
    with endpoint(fail_first(429, retry_after="0.3")) as server:
        assert (await replies_to(fast_settings(server)))[0].text == "{}"
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize(
    ("refused", "status", "schemas"),
    [
        (lambda body: "response_format" in body, 400, [True, False, False]),
        (lambda body: "response_format" in body, 422, [True, False, False]),
        # Refused for another reason: the schema stays on.
        (lambda body: body["seed"] == 1, 400, [True, False, True]),
    ],
    ids=["400", "422", "another reason"],
)
async def test_a_refused_schema_is_omitted_from_then_on(
    refused: Callable[[Body], bool], status: int, schemas: list[bool]
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return error(status, "content filter") if refused(body) else completion("{}")

    with endpoint(answer) as server:
        replies = await replies_to(fast_settings(server), 1, 2)
    assert ["response_format" in body for body in server.requests] == schemas
    assert replies[1].text == "{}" and (replies[0].text or "content filter" in replies[0].failure)


async def test_requests_in_flight_are_sent_again_without_a_refused_schema() -> None:
    running, most = 0, 0

    def answer(body: Body, number: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return error(400, "format?") if "response_format" in body else completion("{}")

    with endpoint(answer) as server:
        proposer = EndpointProposer(fast_settings(server, max_in_flight=2))
        replies = await asyncio.gather(*(proposer.reply(HELLO, SCHEMA, n) for n in range(6)))
        await proposer.close()
    assert [reply.text for reply in replies] == ["{}"] * 6
    assert most == 2, "concurrent requests are limited"


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>busy</html>", {}),
        (200, b'{"choices": [', {}),
        (200, b"", {}),
        (200, b'{"choices": []}', {}),
        (200, b"null", {}),
        (200, b"[1]", {}),
        (200, b"[" * 20_000 + b"]" * 20_000, {}),
        (200, b'{"choices": [{"message": 3}]}', {}),
        (418, b"teapot", {}),
    ],
    ids=["no JSON", "cut", "empty", "no choices", "null", "a list", "deep", "message", "status"],
)
async def test_malformed_responses_are_failures(answer: Answer) -> None:
    with endpoint(lambda body, n: answer) as server:
        (reply,) = await replies_to(fast_settings(server, retries=1))
    assert reply.text in (None, "") and len(reply.failure) < 400


async def test_an_unreachable_or_silent_endpoint_fails() -> None:
    nowhere = EndpointSettings("http://127.0.0.1:9/v1", "m", retries=1)
    (reply,) = await replies_to(nowhere)
    assert reply.text is None and "after at most 1 retries" in reply.failure
    with pytest.raises(ConfigError, match="does not answer"):
        await prepare(nowhere)

    def sleep(body: Body, number: int) -> Answer:
        time.sleep(0.5)
        return completion("{}")

    with endpoint(sleep) as server:
        (reply,) = await replies_to(fast_settings(server, retries=0, timeout=0.2))
    assert reply.text is None and "imeout" in reply.failure


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (error(401, "bad key"), "--proposer-key-env"),
        (error(403, "not yours"), "--proposer-key-env"),
        (error(404, "no such model"), "--proposer-model"),
        (error(400, "what?"), "--proposer-url"),
        (completion("yes"), ""),
        (error(429), ""),  # it is busy now
    ],
)
async def test_a_wrong_key_or_model_is_found_before_the_search(answer: Answer, where: str) -> None:
    with endpoint(lambda body, n: answer) as server:
        if not where:
            await prepare(fast_settings(server))
            return
        with pytest.raises(ConfigError) as caught:
            await prepare(fast_settings(server))
    (problem,) = caught.value.problems
    assert problem.where == where and problem.what and problem.fix
    assert where != "--proposer-model" or problem.fix.endswith(": m")
