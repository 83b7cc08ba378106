"""What a request may say, where, and how it is refused: fields, misplaced fields, headers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pins.table import read as read_table
from tests.serving.unit.samples import Sender, answer_by, served
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api import request as request_module
from vllm_autoprune.serving.api.request import (
    KWARGS,
    MAX_COUNTED,
    MAX_PROBLEMS,
    KeepRequest,
    SentRequest,
    check_request,
    current_request,
    handling,
    merge_headers,
    parse_request,
    read_headers,
    refuse_misplaced,
)
from vllm_autoprune.serving.compat.api import check_requests
from vllm_autoprune.serving.served_state import ATTRIBUTE
from vllm_autoprune.serving.settings import DetailBudgets, RequestRules


@pytest.mark.compat
@pytest.mark.parametrize("row", read_table("refusals"))
def test_a_refusal_of_the_table_has_its_message(senders: Callable[[str], Sender], row: str) -> None:
    """As vLLM calls us: headers and body are checked, then the processor plans the images."""
    request = json.loads(row)
    assert (
        answer_by(senders(request.get("level", "states")), request) == read_table("refusals")[row]
    )


@pytest.fixture(scope="module")
def senders(folder: Any) -> Callable[[str], Sender]:
    """The processor of a server by what it lets requests set."""

    @cache
    def sender(level: Any) -> Sender:
        rules = RequestRules(level, 2, 256, explicit=True, detail=DetailBudgets(low=4, high=16))
        return Sender(folder, budget=8, rules=rules).with_blocks(16)

    return sender


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"budget": 16.0}, "budget"),
        ({"enabled": 0}, "enabled"),
        ({"keep": None}, "keep"),
        ({"turns": [True]}, "turns/0"),
        ({"details": ["auto"]}, "details/0"),
        ({3: 1}, None),
    ],
    ids=repr,
)
def test_other_values_are_refused_with_their_pointer(asked: object, where: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(asked)
    (problem,) = caught.value.problems
    entry = "mm_processor_kwargs/autoprune"
    assert problem.where == (entry if where is None else f"{entry}/{where}")
    assert problem.fix


def test_an_answer_stays_short_whatever_is_asked() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"x" * 10_000 + str(i): "y" * 10_000 for i in range(1000)})
    assert len(caught.value.problems) <= MAX_PROBLEMS
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    "asked",
    [
        {f"x{i}": 1 for i in range(MAX_COUNTED + 1)},
        {"details": ["x"] * (MAX_COUNTED + 1)},
        {"recall_turns": [{f"x{i}": 1 for i in range(MAX_COUNTED + 1)}]},
    ],
    ids=["fields", "items", "fields of an item"],
)
def test_many_problems_are_only_counted(
    asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "escape_unprintable", lambda *_: pytest.fail("a message"))
    with pytest.raises(RequestError, match=r"has 25\d problems"):
        parse_request(asked)


@pytest.mark.parametrize("key", ["a\nERROR forged line", "\x1b[2J", "\u2028", "x" * 10_000 + "\n"])
def test_an_unknown_key_is_reported_on_a_short_line(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({key: 1, "budget": {key: 2}})
    lines = str(caught.value).split("\n")
    assert len(lines) == 3  # the subject and two problems
    assert all(line.isprintable() and len(line) < 300 for line in lines)


# ---- fields in the wrong place ----

ENTRY = {"budget": 16}
PART = {"type": "image_url", "image_url": {"url": "x"}, "autoprune": 8}
IN_DATA = f"multi_modal_data/{KWARGS}/autoprune"


@pytest.mark.parametrize(
    ("extra", "kwargs", "where", "fix"),
    [
        ({"autoprune": 32}, {}, "autoprune", '{"budget": 32}'),
        ({"extra_body": {KWARGS: ENTRY}}, {}, f"extra_body/{KWARGS}/budget", KWARGS),
        ({"multi_modal_data": {KWARGS: {"autoprune": ENTRY}}}, {}, IN_DATA, KWARGS),
        ({"messages": [{"content": [PART]}]}, {}, "messages/0/content/0/autoprune", KWARGS),
        ({"input": [{"image_url": {"budget": 8}}]}, {}, "input/0/image_url/budget", KWARGS),
        ({KWARGS: {"autoprune": ENTRY}}, {}, f"{KWARGS}/autoprune", KWARGS),
    ],
)
def test_a_field_in_the_wrong_place_is_named_with_the_right_one(
    extra: dict[str, object], kwargs: dict[str, object], where: str, fix: str
) -> None:
    with pytest.raises(RequestError) as caught:
        refuse_misplaced(extra, kwargs)
    (problem,) = caught.value.problems
    assert problem.where.startswith(where)
    assert fix in problem.fix


HARMLESS = {
    "autotune": True,
    "autorun": {"budget": 1},
    "autoprune": None,
    "budget": 64,
    "metadata": {"autoprune": "on"},
    "tools": [{"function": {"name": "autoprune", "parameters": {"autoprune": {}}}}],
    "messages": [
        {"role": "user", "content": "autoprune"},
        {"tool_calls": [{"function": {"arguments": '{"autoprune": 1}'}}]},
        {"content": [{"type": "tool_use", "input": {"autoprune": 1}}, {"text": "autoprune: 64"}]},
    ],
    "prompt": list(range(9)),
}


def test_other_fields_are_left_alone() -> None:
    refuse_misplaced({"user_id": 1, "auto": 2}, {"autoprune": ENTRY})
    refuse_misplaced({}, {"size": {"height": 1}, "do_resize": False})
    refuse_misplaced(HARMLESS, {})


def model_config(rules: RequestRules) -> Any:
    state = dataclasses.replace(served(), rules=rules)
    return SimpleNamespace(**{ATTRIBUTE: state})


def request(**fields: object) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return ChatCompletionRequest.model_validate({**body, **fields})


@pytest.mark.compat
def test_a_server_without_a_state_checks_nothing() -> None:
    nothing: Any = SimpleNamespace()
    check_request(nothing, request(autoprune=ENTRY, mm_processor_kwargs={"budget": 3}), False)


@pytest.mark.compat
def test_vllm_s_own_request_is_refused_before_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.online_renderer import OnlineRenderer

    async def stock(self: object, request: object) -> str:
        return "rendered"

    steps: Any = ((OnlineRenderer, "preprocess_chat"), (OnlineRenderer, "preprocess_cmpl"))
    for owner, name in (*steps, (PoolingBaseServing, "_init_ctx")):
        monkeypatch.setattr(owner, name, stock)
    check_requests(check_request, handling)
    preprocess: Any = OnlineRenderer.preprocess_chat
    server: Any = SimpleNamespace(
        model_config=model_config(RequestRules(explicit=True)), trust_request_mm_kwargs=False
    )
    with pytest.raises(VLLMValidationError, match="ignored at the top of a request"):
        preprocess(server, request(autoprune=ENTRY))
    answer: Any = preprocess(server, request(mm_processor_kwargs={"autoprune": ENTRY}))
    assert asyncio.run(answer) == "rendered"


# ---- headers ----

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
        *([(BUDGET, text)] for text in ("", "8.5", "8, 9", "null", "[", "{}", '"8"')),
        [(BUDGET, "9" * 5000)],
        [(BUDGET, "[" * 5000)],
        [(BUDGET, "8"), (BUDGET, "8")],
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
