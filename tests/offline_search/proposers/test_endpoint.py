from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from offline_search.candidates.components import JsonObject
from offline_search.proposers.endpoint import EndpointProposer, EndpointSettings, Price
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Reply
from tests.offline_search.endpoint import Answer, Body, Told, endpoint, error, said
from vllm_autoprune.errors import ConfigError

HELLO: Messages = ({"role": "user", "content": "hello"},)
SCHEMA: JsonObject = {"type": "object"}


def quick(told: Told, **changes: object) -> EndpointSettings:
    waits = {"retries": 3, "first_wait": 0.01, "longest_wait": 0.05, "timeout": 2.0}
    return EndpointSettings(told.url, "m", **{**waits, **changes})  # type: ignore[arg-type]


async def asked(settings: EndpointSettings) -> Reply:
    proposer = EndpointProposer(settings)
    try:
        return await proposer.reply(HELLO, SCHEMA, seed=7)
    finally:
        await proposer.close()


async def prepared(settings: EndpointSettings) -> None:
    proposer = EndpointProposer(settings)
    try:
        await proposer.prepare()
    finally:
        await proposer.close()


async def test_a_reply_its_cost_and_what_was_asked() -> None:
    with endpoint(lambda body, n: said("{}")) as told:
        reply = await asked(quick(told, price=Price(1e6, 2e6), temperature=0.5, reply_tokens=99))
    assert reply == Reply("{}", "", reply.cost)
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == (10, 5)
    assert reply.cost.money == 20.0
    (body,) = told.asked
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["seed"], body["temperature"], body["max_tokens"]) == (7, 0.5, 99)


async def test_an_endpoint_that_does_not_bear_a_seed() -> None:
    with endpoint(lambda body, n: said("{}")) as told:
        await asked(quick(told, seeded=False))
    assert "seed" not in told.asked[0]


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_a_passing_failure_is_waited_out(status: int) -> None:
    with endpoint(lambda body, n: said("{}") if n == 2 else error(status)) as told:
        reply = await asked(quick(told))
    assert reply.text == "{}" and len(told.asked) == 3


async def test_retries_are_bounded_and_told() -> None:
    with endpoint(lambda body, n: error(503, "overloaded")) as told:
        reply = await asked(quick(told))
    assert reply.text is None and len(told.asked) == 4
    assert "overloaded" in reply.failure and "after 3 retries" in reply.failure


async def test_an_endpoint_says_how_long_to_wait_within_bounds() -> None:
    loop = asyncio.get_running_loop()
    with endpoint(lambda b, n: said("{}") if n else error(429, retry_after="1000")) as told:
        began = loop.time()
        reply = await asked(quick(told))
        assert reply.text == "{}" and loop.time() - began < 2


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_no_retry_mends_is_asked_once(status: int) -> None:
    with endpoint(lambda body, n: error(status, "never")) as told:
        reply = await asked(quick(told))
    assert reply.text is None and "never" in reply.failure and len(told.asked) == 1


async def test_an_endpoint_without_schemas_is_asked_without() -> None:
    def answer(body: Body, number: int) -> Answer:
        return error(400, "response_format?") if "response_format" in body else said("{}")

    with endpoint(answer) as told:
        proposer = EndpointProposer(quick(told))
        assert (await proposer.reply(HELLO, SCHEMA, 1)).text == "{}"
        assert (await proposer.reply(HELLO, SCHEMA, 2)).text == "{}"
        await proposer.close()
    assert ["response_format" in body for body in told.asked] == [True, False, False]


async def test_a_request_that_is_refused_either_way() -> None:
    with endpoint(lambda body, n: error(400, "too long")) as told:
        reply = await asked(quick(told))
    assert reply.text is None and "too long" in reply.failure and len(told.asked) == 2


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
async def test_nonsense_is_a_failure_and_no_exception(name: str, answer: Answer) -> None:
    with endpoint(lambda body, n: answer) as told:
        reply = await asked(quick(told, retries=1))
    assert reply.text in (None, "") and len(reply.failure) < 400


async def test_a_refusal_is_a_reply_to_repair() -> None:
    with endpoint(lambda body, n: said(None, refusal="I will not.")) as told:
        assert (await asked(quick(told))).text == "I will not."


async def test_nobody_listens() -> None:
    nowhere = EndpointSettings("http://127.0.0.1:9/v1", "m", retries=1, first_wait=0.01)
    reply = await asked(nowhere)
    assert reply.text is None and "after 1 retries" in reply.failure
    with pytest.raises(ConfigError, match="does not answer"):
        await prepared(nowhere)


async def test_one_that_never_answers_is_given_up() -> None:
    release = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await release.wait()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    silent = EndpointSettings(f"http://127.0.0.1:{port}/v1", "m", retries=0, timeout=0.2)
    reply = await asked(silent)
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
async def test_a_wrong_key_or_model_is_one_error_before_the_first_round(
    answer: Answer, where: str
) -> None:
    with endpoint(lambda body, n: answer) as told, pytest.raises(ConfigError) as caught:
        await prepared(quick(told))
    (problem,) = caught.value.problems
    assert problem.where == where and problem.what and problem.mend
    if where == "--proposer-model":
        assert "m" in problem.mend


Answering = Callable[[Body, int], Answer]


@pytest.mark.parametrize(
    "answer", [lambda b, n: said("yes"), lambda b, n: error(429)], ids=["answers", "busy"]
)
async def test_an_endpoint_that_answers_or_is_only_busy_will_do(answer: Answering) -> None:
    with endpoint(answer) as told:
        await prepared(quick(told))


async def test_no_more_requests_at_once_than_allowed() -> None:
    running, most = 0, 0

    def answer(body: Body, number: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return said("{}")

    with endpoint(answer) as told:
        proposer = EndpointProposer(quick(told, max_in_flight=2))
        await asyncio.gather(*(proposer.reply(HELLO, SCHEMA, seed) for seed in range(6)))
        await proposer.close()
    assert most == 2
