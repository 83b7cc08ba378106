from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from offline_search.components import JsonObject
from offline_search.prompt import Messages
from offline_search.proposer import EndpointProposer, EndpointSettings, Price, Reply
from tests.offline_search.endpoint import Answer, Body, FakeEndpoint, completion, endpoint, error
from vllm_autoprune.errors import ConfigError

HELLO: Messages = ({"role": "user", "content": "hello"},)
SCHEMA: JsonObject = {"type": "object"}
Answering = Callable[[Body, int], Answer]


def fast_settings(server: FakeEndpoint, **changes: object) -> EndpointSettings:
    fast: dict[str, Any] = {"retries": 3, "timeout": 2.0, **changes}
    return EndpointSettings(server.url, "m", **fast)


async def reply_to(settings: EndpointSettings) -> Reply:
    proposer = EndpointProposer(settings)
    try:
        return await proposer.reply(HELLO, SCHEMA, seed=7)
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
        reply = await reply_to(
            fast_settings(server, price=Price(1e6, 2e6), temperature=0.5, reply_tokens=99)
        )
    assert reply == Reply("{}", "", reply.cost)
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == (10, 5)
    assert reply.cost.money == 20.0
    (body,) = server.requests
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["seed"], body["temperature"], body["max_tokens"]) == (7, 0.5, 99)


async def test_seeds_can_be_omitted() -> None:
    with endpoint(lambda body, n: completion("{}")) as server:
        await reply_to(fast_settings(server, seeded=False))
    assert "seed" not in server.requests[0]


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_temporary_failures_are_retried(status: int) -> None:
    with endpoint(
        lambda body, n: completion("{}") if n == 2 else error(status, retry_after_ms="5")
    ) as server:
        reply = await reply_to(fast_settings(server))
    assert reply.text == "{}" and len(server.requests) == 3


async def test_retries_are_bounded_and_reported() -> None:
    with endpoint(lambda body, n: error(503, "overloaded", retry_after_ms="5")) as server:
        reply = await reply_to(fast_settings(server))
    assert reply.text is None and len(server.requests) == 4
    assert "overloaded" in reply.failure and "after at most 3 retries" in reply.failure


async def test_retry_after_is_waited_for_within_bounds() -> None:
    def busy(seconds: str) -> Answering:
        return lambda body, n: completion("{}") if n else error(429, retry_after=seconds)

    start = time.monotonic()
    with endpoint(busy("0.3")) as server:
        assert (await reply_to(fast_settings(server))).text == "{}"
    assert time.monotonic() - start >= 0.3
    with endpoint(busy("1000")) as server:
        assert "RateLimitError" in (await reply_to(fast_settings(server))).failure


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_permanent_errors_are_not_retried(status: int) -> None:
    with endpoint(lambda body, n: error(status, "never")) as server:
        reply = await reply_to(fast_settings(server))
    assert reply.text is None and "never" in reply.failure and len(server.requests) == 1


async def test_a_refused_schema_is_omitted_from_then_on() -> None:
    def answer(body: Body, number: int) -> Answer:
        return error(400, "response_format?") if "response_format" in body else completion("{}")

    with endpoint(answer) as server:
        proposer = EndpointProposer(fast_settings(server))
        assert (await proposer.reply(HELLO, SCHEMA, 1)).text == "{}"
        assert (await proposer.reply(HELLO, SCHEMA, 2)).text == "{}"
        await proposer.close()
    assert ["response_format" in body for body in server.requests] == [True, False, False]


@pytest.mark.parametrize("status", [400, 422])
async def test_requests_in_flight_are_sent_again_without_a_refused_schema(status: int) -> None:
    def answer(body: Body, number: int) -> Answer:
        return error(status, "format?") if "response_format" in body else completion("{}")

    with endpoint(answer) as server:
        proposer = EndpointProposer(fast_settings(server))
        replies = await asyncio.gather(*(proposer.reply(HELLO, SCHEMA, n) for n in range(4)))
        await proposer.close()
    assert [reply.text for reply in replies] == ["{}"] * 4


async def test_a_request_that_is_refused_for_another_reason_leaves_the_schema_on() -> None:
    def answer(body: Body, number: int) -> Answer:
        return error(400, "content filter") if body["seed"] == 1 else completion("{}")

    with endpoint(answer) as server:
        proposer = EndpointProposer(fast_settings(server))
        refused = await proposer.reply(HELLO, SCHEMA, 1)
        assert refused.text is None and "content filter" in refused.failure
        assert (await proposer.reply(HELLO, SCHEMA, 2)).text == "{}"
        await proposer.close()
    assert ["response_format" in body for body in server.requests] == [True, False, True]


async def test_a_request_refused_without_schema_fails() -> None:
    with endpoint(lambda body, n: error(400, "too long")) as server:
        reply = await reply_to(fast_settings(server))
    assert reply.text is None and "too long" in reply.failure and len(server.requests) == 2


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("no JSON", (200, b"<html>busy</html>", {})),
        ("cut", (200, b'{"choices": [', {})),
        ("empty", (200, b"", {})),
        ("no choices", (200, b'{"choices": []}', {})),
        ("null", (200, b"null", {})),
        ("a list", (200, b"[1]", {})),
        ("deep", (200, b"[" * 20_000 + b"]" * 20_000, {})),
        ("odd message", (200, b'{"choices": [{"message": 3}]}', {})),
        ("odd status", (418, b"teapot", {})),
    ],
)
async def test_malformed_responses_are_failures(name: str, answer: Answer) -> None:
    with endpoint(lambda body, n: answer) as server:
        reply = await reply_to(fast_settings(server, retries=1))
    assert reply.text in (None, "") and len(reply.failure) < 400


async def test_a_refusal_is_a_reply_to_repair() -> None:
    with endpoint(lambda body, n: completion(None, refusal="I will not.")) as server:
        assert (await reply_to(fast_settings(server))).text == "I will not."


async def test_an_unreachable_endpoint_fails() -> None:
    nowhere = EndpointSettings("http://127.0.0.1:9/v1", "m", retries=1)
    reply = await reply_to(nowhere)
    assert reply.text is None and "after at most 1 retries" in reply.failure
    with pytest.raises(ConfigError, match="does not answer"):
        await prepare(nowhere)


async def test_a_silent_endpoint_times_out() -> None:
    release = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await release.wait()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    silent = EndpointSettings(f"http://127.0.0.1:{port}/v1", "m", retries=0, timeout=0.2)
    reply = await reply_to(silent)
    assert reply.text is None and "imeout" in reply.failure
    release.set()
    for writer in writers:
        writer.close()
    server.close()


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (error(401, "bad key"), "--proposer-key-env"),
        (error(403, "not yours"), "--proposer-key-env"),
        (error(404, "no such model"), "--proposer-model"),
        (error(400, "what?"), "--proposer-url"),
    ],
)
async def test_prepare_reports_a_wrong_key_or_model(answer: Answer, where: str) -> None:
    with endpoint(lambda body, n: answer) as server, pytest.raises(ConfigError) as caught:
        await prepare(fast_settings(server))
    (problem,) = caught.value.problems
    assert problem.where == where and problem.what and problem.fix
    if where == "--proposer-model":
        assert "m" in problem.fix


@pytest.mark.parametrize(
    "answer", [lambda b, n: completion("yes"), lambda b, n: error(429)], ids=["answers", "busy"]
)
async def test_prepare_accepts_a_busy_endpoint(answer: Answering) -> None:
    with endpoint(answer) as server:
        await prepare(fast_settings(server))


async def test_concurrent_requests_are_limited() -> None:
    running, most = 0, 0

    def answer(body: Body, number: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return completion("{}")

    with endpoint(answer) as server:
        proposer = EndpointProposer(fast_settings(server, max_in_flight=2))
        await asyncio.gather(*(proposer.reply(HELLO, SCHEMA, seed) for seed in range(6)))
        await proposer.close()
    assert most == 2
