from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.request_headers import (
    KeepRequest,
    SentRequest,
    current_request,
    handling,
    merge_headers,
    read_headers,
)
from vllm_autoprune.serving.startup.flags import MIDDLEWARE

BUDGET, STATE = "x-autoprune-budget", "x-autoprune-state"


@pytest.mark.parametrize(
    ("text", "budget"),
    [("64", 64), ("[64, 32]", [64, 32]), ('{"shared": 96}', {"shared": 96}), ("0", 0)],
)
def test_a_header_says_what_the_entry_says(text: str, budget: object) -> None:
    fields = {"budget": budget, "state": "visionzip"}
    assert read_headers([(BUDGET, text), (STATE, "visionzip")]) == fields


@pytest.mark.parametrize(
    "headers",
    [
        *(
            [(BUDGET, text)]
            for text in ("", "many", "8.5", "8, 9", "null", "true", "[", "{}", '"8"')
        ),
        [(BUDGET, "9" * 5000)],
        [(BUDGET, "[" * 5000)],
        [(BUDGET, "8"), (BUDGET, "8")],
        [(STATE, "")],
        [("x-autoprune-recall", "8")],
        [("x-autoprune", "8")],
    ],
    ids=str,
)
def test_a_malformed_header_is_refused_on_a_short_line(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(RequestError) as caught:
        read_headers(headers)
    (problem,) = caught.value.problems
    assert problem.where.startswith("header x-autoprune")
    assert problem.fix and len(str(problem)) < 200


def test_header_and_entry_have_to_agree() -> None:
    fields: dict[str, object] = {"budget": 64}
    assert merge_headers(None, fields) == fields
    assert merge_headers({"state": "trim"}, fields) == {"state": "trim", "budget": 64}
    assert merge_headers({"budget": None}, fields) == fields
    assert merge_headers({"budget": 64}, fields) == fields
    with pytest.raises(RequestError, match="send one of the two"):
        merge_headers({"budget": 63}, fields)


def test_each_request_sees_its_own_headers() -> None:
    seen: dict[str, object] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        with handling(None):
            assert current_request() is None
        await receive()
        await asyncio.sleep(0)
        sent = await asyncio.create_task(read())
        seen[scope["name"]] = (sent.headers, sent.take_body())

    async def read() -> SentRequest:
        sent = current_request()
        assert sent is not None
        return sent

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b'{"autoprune": 1}'}

    async def send(message: object) -> None: ...

    def scope(i: int) -> dict[str, object]:
        headers = [(BUDGET.encode(), str(i).encode()), (b"host", b"x")]
        path = "/v1/messages" if i % 2 else "/v1/chat/completions"
        return {"type": "http", "name": str(i), "path": path, "headers": headers}

    async def all_at_once() -> None:
        keep = KeepRequest(app)
        await asyncio.gather(*(keep(scope(i), receive, send) for i in range(20)))
        assert current_request() is None

    asyncio.run(all_at_once())
    expected = {
        str(i): ([(BUDGET, str(i))], {"autoprune": 1} if i % 2 else None) for i in range(20)
    }
    assert seen == expected


def test_the_middleware_is_where_the_flags_say() -> None:
    module, _, name = MIDDLEWARE.rpartition(".")
    assert getattr(importlib.import_module(module), name) is KeepRequest
