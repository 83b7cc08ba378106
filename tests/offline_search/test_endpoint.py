"""The endpoint of a language model: requests, retries, refused fields, and what responses hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from offline_search.components import JsonObject
from offline_search.endpoint import EndpointProposer, EndpointSettings
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from tests.fake_server import Answer, Body, FakeServer
from tests.fake_server import Reply as ServerReply
from tests.offline_search.synthetic import completion, endpoint, error
from vllm_autoprune.errors import ConfigError, SearchError

HELLO: Messages = ({"role": "user", "content": "hello"},)
SCHEMA: JsonObject = {"type": "object"}
Answering = Callable[[Body, int], Answer]
Printed = pytest.CaptureFixture[str]


def fast_settings(server: FakeServer, **changes: object) -> EndpointSettings:
    fast: dict[str, Any] = {
        "retries": 3,
        "first_wait": 0.001,
        "timeout": 2.0,
        **changes,
    }
    return EndpointSettings(f"{server.url}/v1", "m", **fast)


async def reply_to(settings: EndpointSettings) -> Reply:
    async with EndpointProposer(settings) as proposer:
        return await proposer.reply(HELLO, SCHEMA, 7)


async def test_a_reply_has_text_and_cost() -> None:
    options = {"reasoning_effort": "high", "temperature": 0.1}
    with endpoint(lambda body, n: completion("{}")) as server:
        changes = {"price": (1e6, 2e6), "temperature": 0.5, "reply_tokens": 99}
        reply = await reply_to(fast_settings(server, **changes))
        await reply_to(
            fast_settings(server, unsent=frozenset({"seed"}), options=options)
        )
    assert (reply.text, reply.failure, reply.cut) == ("{}", "", False)
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == (10, 5)
    assert reply.cost.money == 20.0
    seeded, unseeded = server.requests
    assert seeded["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (seeded["seed"], seeded["temperature"], seeded["max_tokens"]) == (7, 0.5, 99)
    assert "seed" not in unseeded and options.items() <= unseeded.items()


def fail_first(status: int, times: int = 1, **headers: str) -> Answering:
    """An endpoint whose first answers are errors."""
    return lambda body, n: (
        completion("{}") if n >= times else error(status, "busy", **headers)
    )


@pytest.mark.parametrize(
    ("answer", "sent", "failure", "printed"),
    [
        *(
            (
                fail_first(status, 2),
                3,
                "",
                f"this run: 2 x status {status}: busy, asked again",
            )
            for status in (429, 503, 408)
        ),
        (fail_first(429, 1, retry_after="0.01"), 2, "", "1 x status 429"),
        (
            fail_first(503, 99),
            4,
            "status 503: busy, after at most 3 retries",
            "3 x status 503",
        ),
        (fail_first(409, 99), 1, "status 409: busy", ""),
        (fail_first(400, 99), 2, "busy", ""),  # with the schema and without it
    ],
    ids=["429", "503", "408", "Retry-After", "always 503", "409", "400"],
)
async def test_what_may_pass_is_asked_again_and_said_what_remains_is_a_reply(
    answer: Answering, sent: int, failure: str, printed: str, capsys: Printed
) -> None:
    with endpoint(answer) as server:
        reply = await reply_to(fast_settings(server))
    assert reply.failure == failure or (failure == "busy" and failure in reply.failure)
    assert len(server.requests) == sent and reply.text == (None if failure else "{}")
    assert (printed in (text := capsys.readouterr().err)) and bool(text) == bool(
        printed
    )


def refusing(
    *names: str, status: int = 400, text: str = "{} is unsupported"
) -> Answering:
    """An endpoint that refuses each of these fields."""

    def answer(body: Body, number: int) -> Answer:
        refused = [name for name in names if name in body]
        return error(status, text.format(*refused)) if refused else completion("{}")

    return answer


FORBIDDEN = json.dumps({"detail": [{"loc": ["body", "seed"], "msg": "extra"}]}).encode()


@pytest.mark.parametrize(
    ("answer", "refused", "by_the_check"),
    [
        (
            refusing("max_tokens", text="use 'max_completion_tokens', not '{}'"),
            ["max_tokens"],
            1,
        ),
        (
            refusing("seed", "temperature", "max_tokens", status=422),
            ["seed", "temperature", "max_tokens"],
            3,
        ),
        *(
            (
                refusing("response_format", status=status, text="grammar"),
                ["response_format"],
                0,
            )
            for status in (400, 422, 500)
        ),
        (
            lambda body, n: (
                (422, FORBIDDEN, {}) if "seed" in body else completion("{}")
            ),
            ["seed"],
            1,
        ),
        # Not the field's fault: nothing is left out from then on.
        (
            lambda body, n: (
                error(400, "seed 1") if body.get("seed", 1) == 1 else completion("{}")
            ),
            [],
            0,
        ),
    ],
)
async def test_refused_fields_are_left_out_from_then_on(
    answer: Answering, refused: list[str], by_the_check: int, capsys: Printed
) -> None:
    sent = {"model", "messages", "max_tokens", "temperature", "seed", "response_format"}
    with endpoint(answer) as server:
        async with EndpointProposer(fast_settings(server)) as proposer:
            await proposer.prepare()
            assert len(proposer.unsent) == by_the_check
            await proposer.reply(HELLO, SCHEMA, 1)
            reply = await proposer.reply(HELLO, SCHEMA, 2)
    renamed = {"max_completion_tokens"} if "max_tokens" in refused else set()
    assert (
        reply.text == "{}" and set(server.requests[-1]) == sent - set(refused) | renamed
    )
    assert server.requests[-1].get("max_completion_tokens", 1024) == 1024
    assert proposer.unsent == set(refused)
    lines = [line for line in capsys.readouterr().err.splitlines() if "refuses" in line]
    assert {line.split()[3] for line in lines} == set(refused) and len(lines) == len(
        refused
    )


THOUGHT = {"role": "assistant", "content": None, "reasoning": "{}"}
PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "{}"}]},
    {"type": "text", "text": "[1, "},
    {"type": "output_text", "text": "2]"},
]


def choices(message: object, finish: object = "stop") -> Answer:
    return completion("", choices=[{"message": message, "finish_reason": finish}])


@pytest.mark.parametrize(
    ("answer", "text", "failure", "cost"),
    [
        (choices(THOUGHT), "<think>", "", (10, 5)),
        (choices({"content": PARTS}), "[1, 2]", "", (10, 5)),
        (choices({"content": None, "refusal": "No."}), "No.", "", (10, 5)),
        (choices({}, None), "", "", (10, 5)),
        (completion("{}", usage="many"), "{}", "", (0, 0)),
        (completion("{}", usage={"prompt_tokens": "7", "completion_tokens": -1}), "{}", "", (7, 0)),
        (completion("", choices=None, error={"message": "no credit"}), None, "no credit", (0, 0)),
        (completion("", choices=[]), None, '"choices": []', (0, 0)),
        (choices(None), None, "no chat completion", (0, 0)),
        ((200, b"null", {}), None, "null", (0, 0)),
        ((200, b"[" * 20_000 + b"]" * 20_000, {}), None, "no chat completion", (0, 0)),
        ((200, b"<html>sign in</html>", {}), None, "<html>sign in", (0, 0)),
        ((200, completion("{}")[1][:50], {}), None, "no chat completion", (0, 0)),
        ((200, completion("{}")[1], {"Content-Encoding": "gzip"}), None, "DecodingError", (0, 0)),
        ((307, b"", {"Location": "/v2"}), None, "status 307", (0, 0)),
    ],
)  # fmt: skip
async def test_what_a_response_holds(
    answer: Answer, text: str | None, failure: str, cost: tuple[int, int]
) -> None:
    with endpoint(lambda body, n: answer) as server:
        reply = await reply_to(fast_settings(server, retries=0))
    assert reply.text == text and failure in reply.failure and "\n" not in reply.failure
    assert (
        reply.cost.prompt_tokens,
        reply.cost.completion_tokens,
    ) == cost and not reply.cut
    assert len(reply.failure) < 400


async def test_an_unreachable_endpoint_ends_the_search() -> None:
    nowhere = EndpointSettings(
        "http://127.0.0.1:9/v1", "m", retries=1, first_wait=0.001
    )
    with pytest.raises(SearchError, match=r"does not answer .* then --resume"):
        await reply_to(nowhere)
    with pytest.raises(ConfigError, match="does not answer"):
        await EndpointProposer(nowhere).prepare()


def hang(body: Body, number: int) -> Answer:
    time.sleep(0.5)
    return completion("{}")


UNPAID: Answer = (
    429,
    b'{"error": {"message": "no", "code": "insufficient_quota"}}',
    {},
)
NO_CREDIT = "has no credit left for this key (status 4"


@pytest.mark.parametrize(
    ("answer", "where", "message", "sent"),
    [
        (error(401, "bad"), "--proposer-key-env", "answers with status 401: bad", 1),
        (error(402, "pay"), "--proposer-url", NO_CREDIT, 1),
        (UNPAID, "--proposer-url", NO_CREDIT, 1),
        (error(404, "gone"), "--proposer-model", "answers with status 404: gone", 1),
        (hang, "--proposer-url", "has not answered within 0.2 s", 2),
        (
            ServerReply(drop=True),
            "--proposer-url",
            "closes the connection before it has",
            4,
        ),
    ],
    ids=["401", "402", "quota", "404", "hangs", "closes"],
)
async def test_what_every_request_would_meet_ends_the_search_and_is_told_once(
    answer: Any, where: str, message: str, sent: int
) -> None:
    with endpoint(answer if callable(answer) else lambda body, n: answer) as server:
        settings = fast_settings(server, timeout=0.2)
        with pytest.raises(SearchError) as caught:
            await reply_to(settings)
        assert len(server.requests) == sent
        with pytest.raises(ConfigError) as refused:
            await EndpointProposer(settings).prepare()
    (problem,) = caught.value.problems
    assert problem.where == where and message in problem.what
    assert problem.fix.endswith("; then --resume, which goes on from here")
    assert refused.value.problems[0].what == problem.what


async def test_a_model_or_its_address_may_be_wrong_where_no_model_is_listed() -> None:
    with endpoint(lambda body, n: error(404, "gone")) as server:
        server.pages["/v1/models"] = None
        with pytest.raises(ConfigError, match="--proposer-url, --proposer-model: "):
            await EndpointProposer(fast_settings(server)).prepare()


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (error(403, "not yours"), "--proposer-key-env"),
        (error(400, "what?"), "--proposer-url"),
        ((307, b"", {"Location": "/v2"}), "--proposer-url"),
        (
            completion("", choices=None, error={"message": "no credit"}),
            "--proposer-url",
        ),
        ((200, b"<html>sign in</html>", {}), "--proposer-url"),
        (error(429), ""),  # it is busy now
        (error(503), ""),
    ],
)
async def test_an_answer_of_another_kind_is_found_before_the_search(
    answer: Answer, where: str
) -> None:
    with endpoint(lambda body, n: answer) as server:
        async with EndpointProposer(fast_settings(server)) as proposer:
            if not where:
                await proposer.prepare()
                return
            with pytest.raises(ConfigError) as caught:
                await proposer.prepare()
    (problem,) = caught.value.problems
    assert problem.where == where and problem.what and problem.fix
