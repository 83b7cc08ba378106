"""What a request may say, where, and how it is refused: fields, misplaced fields, headers."""

from __future__ import annotations

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
    check_request,
    handling,
    join_headers,
    parse_request,
    refuse_misplaced,
)
from vllm_autoprune.serving.compat import check_requests
from vllm_autoprune.serving.plan import KWARGS
from vllm_autoprune.serving.served_state import ATTRIBUTE
from vllm_autoprune.serving.settings import DetailBudgets, RequestRules

REFUSALS = read_table("refusals")
"""Requests and their answers, which ``test_server.py`` gets over HTTP."""


@pytest.fixture(scope="module")
def senders(folder: Any) -> Callable[[str], Sender]:
    """The processor of a server by what it lets requests set."""

    @cache
    def sender(level: Any) -> Sender:
        rules = RequestRules(level, 2, 256, explicit=True, detail=DetailBudgets(low=4, high=16))
        return Sender(folder, budget=8, rules=rules).with_blocks(16)

    return sender


@pytest.mark.compat
@pytest.mark.parametrize("row", REFUSALS)
def test_a_refusal_of_the_table_has_its_message(senders: Callable[[str], Sender], row: str) -> None:
    """As vLLM calls us: headers and body are checked, then the processor plans the images."""
    request = json.loads(row)
    assert answer_by(senders(request.get("level", "states")), request) == REFUSALS[row]


def test_many_problems_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "escape_unprintable", lambda *_: pytest.fail("a message"))
    fields = {f"x{i}": 1 for i in range(257)}
    for asked in (fields, {"details": ["x"] * 257}, {"recall_turns": [fields]}):
        with pytest.raises(RequestError, match=r"has 25\d problems"):
            parse_request(asked)


@pytest.mark.parametrize(
    "keys",
    [["a\nERROR forged line"], ["\x1b[2J"], ["\u2028"], ["x" * 10_000 + str(i) for i in range(99)]],
    ids=["line", "escape", "separator", "long"],
)
def test_an_answer_is_of_short_lines_whatever_is_asked(keys: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({**dict.fromkeys(keys, 1), "budget": {keys[0]: 2}})
    lines = str(caught.value).split("\n")
    assert len(lines) <= 17
    assert all(line.isprintable() and len(line) < 300 for line in lines)
    with pytest.raises(RequestError, match="keys that are no text"):
        parse_request({3: 1})


# ---- fields in the wrong place ----

ENTRY = {"budget": 16}
PART = {"type": "image_url", "image_url": {"url": "x"}, "autoprune": 8}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"extra_body": {KWARGS: ENTRY}}, f"extra_body/{KWARGS}/budget"),
        ({"messages": [{"content": [PART]}]}, "messages/0/content/0/autoprune"),
        ({KWARGS: {"autoprune": ENTRY}}, f"{KWARGS}/autoprune"),
        ({"metadata": {"autoprune": "on"}, "prompt": [0, 1, 2]}, None),
        ({"messages": [{"content": "autoprune"}, {"content": [{"text": "autoprune: 64"}]}]}, None),
        ({"messages": [{"tool_calls": [{"function": {"arguments": '{"autoprune": 1}'}}]}]}, None),
    ],
)
def test_a_field_is_refused_at_any_depth_where_nothing_reads_it(
    fields: dict[str, object], where: str | None
) -> None:
    refuse_misplaced({"user_id": 1}, {"autoprune": ENTRY, "size": {"height": 1}})
    if where is None:
        refuse_misplaced(fields, {})
        return
    with pytest.raises(RequestError) as caught:
        refuse_misplaced(fields, {})
    (problem,) = caught.value.problems
    assert problem.where == where
    assert KWARGS in problem.fix


@pytest.mark.compat
def test_a_request_is_checked_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused, of every endpoint: ``test_field_inputs.py``."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.online_renderer import OnlineRenderer

    monkeypatch.setattr(OnlineRenderer, "preprocess_chat", lambda self, request: "rendered")
    for owner, name in ((OnlineRenderer, "preprocess_cmpl"), (PoolingBaseServing, "_init_ctx")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    check_requests(check_request, handling)

    def render(state: object, **fields: object) -> Any:
        config = SimpleNamespace(**{ATTRIBUTE: state})
        server = SimpleNamespace(model_config=config, trust_request_mm_kwargs=False)
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}], **fields}
        preprocess: Any = OnlineRenderer.preprocess_chat
        return preprocess(server, ChatCompletionRequest.model_validate(body))

    state = dataclasses.replace(served(), rules=RequestRules(explicit=True))
    with pytest.raises(VLLMValidationError, match="ignored at the top of a request"):
        render(state, autoprune=ENTRY)
    assert render(state, mm_processor_kwargs={"autoprune": ENTRY}) == "rendered"
    # A server without a state checks nothing.
    assert render(None, autoprune=ENTRY, mm_processor_kwargs={"budget": 3}) == "rendered"


# ---- headers ----

BUDGET, STATE = "x-autoprune-budget", "x-autoprune-state"


@pytest.mark.parametrize(
    ("text", "budget"), [("64", 64), ("[64, 32]", [64, 32]), ('{"shared": 96}', {"shared": 96})]
)
def test_a_header_says_what_the_entry_says_and_agrees_with_it(text: str, budget: object) -> None:
    fields: dict[str, object] = {"budget": budget, "state": "visionzip"}
    headers = [(BUDGET, text), (STATE, "visionzip")]
    for agreeing in (None, {"budget": None}, {"budget": budget}, {"state": "visionzip"}):
        assert join_headers(agreeing, headers) == fields
    assert join_headers({"keep": "state"}, headers) == {"keep": "state", **fields}
    for malformed in ([(BUDGET, "9" * 5000)], [(BUDGET, "[" * 5000)], [headers[0]] * 2):
        with pytest.raises(RequestError) as caught:
            join_headers({}, malformed)
        (problem,) = caught.value.problems
        assert problem.fix and len(str(problem)) < 200
