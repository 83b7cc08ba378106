from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.samples import served
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.misplaced_fields import (
    KWARGS,
    check_request,
    find_misplaced_field,
)
from vllm_autoprune.serving.compat.api import _wrap_preprocess
from vllm_autoprune.serving.shared.request_rules import RequestRules
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE

ENTRY = {"budget": 16}
PART = {"type": "image_url", "image_url": {"url": "x"}, "autoprune": 8}
IN_DATA = f"multi_modal_data/{KWARGS}/autoprune"


@pytest.mark.parametrize(
    ("extra", "kwargs", "where", "fix"),
    [
        ({"autoprune": ENTRY}, {}, "autoprune", '"mm_processor_kwargs": {"autoprune"'),
        ({"autoprune_budget": 16}, {}, "autoprune_budget", "mm_processor_kwargs"),
        ({"extra": 1}, {"budget": 16}, "mm_processor_kwargs/budget", "one level down"),
        ({}, {"state": "visionzip"}, "mm_processor_kwargs/state", "one level down"),
        ({}, {"auto_prune": ENTRY}, "mm_processor_kwargs/auto_prune", "'autoprune'"),
        ({}, {"autopurne": ENTRY}, "mm_processor_kwargs/autopurne", "'autoprune'"),
        ({"autoprune": False}, {}, "autoprune", '{"enabled": false}'),
        ({"autoprune": 32}, {}, "autoprune", '{"budget": 32}'),
        ({"extra_body": {"autoprune": ENTRY}}, {}, "extra_body/autoprune", KWARGS),
        ({"extra_body": {KWARGS: ENTRY}}, {}, f"extra_body/{KWARGS}/budget", KWARGS),
        ({"multi_modal_data": {KWARGS: {"autoprune": ENTRY}}}, {}, IN_DATA, KWARGS),
        ({"messages": [{"content": [PART]}]}, {}, "messages/0/content/0/autoprune", KWARGS),
        ({"input": [{"image_url": {"budget": 8}}]}, {}, "input/0/image_url/budget", KWARGS),
        ({KWARGS: {"autoprune": ENTRY}}, {}, f"{KWARGS}/autoprune", KWARGS),
        ({"extra_headers": {"x-autoprune-state": "trim"}}, {}, "extra_headers/x-", KWARGS),
    ],
)
def test_a_field_in_the_wrong_place_is_named_with_the_right_one(
    extra: dict[str, object], kwargs: dict[str, object], where: str, fix: str
) -> None:
    problem = find_misplaced_field(extra, kwargs)
    assert problem is not None
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
    assert find_misplaced_field({"user_id": 1, "auto": 2}, {"autoprune": ENTRY}) is None
    assert find_misplaced_field({}, {"size": {"height": 1}, "do_resize": False}) is None
    assert find_misplaced_field(HARMLESS, {}) is None


def model_config(rules: RequestRules) -> Any:
    state = dataclasses.replace(served(), rules=rules)
    return SimpleNamespace(**{ATTRIBUTE: state})


def request(**fields: object) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return ChatCompletionRequest.model_validate({**body, **fields})


@pytest.mark.compat
def test_an_entry_that_no_flag_allows_is_answered_with_the_plugin_s_flag() -> None:
    default = model_config(RequestRules())
    with pytest.raises(RequestError, match="--autoprune-requests budget"):
        check_request(default, request(mm_processor_kwargs={"autoprune": ENTRY}), False)
    check_request(default, request(mm_processor_kwargs={"autoprune": ENTRY}), True)
    allowing = model_config(RequestRules(explicit=True))
    check_request(allowing, request(mm_processor_kwargs={"autoprune": ENTRY}), False)


@pytest.mark.compat
def test_a_server_without_a_state_checks_nothing() -> None:
    nothing: Any = SimpleNamespace()
    check_request(nothing, request(autoprune=ENTRY, mm_processor_kwargs={"budget": 3}), False)


@pytest.mark.compat
def test_vllm_s_own_request_is_refused_before_it_is_rendered() -> None:
    from vllm.exceptions import VLLMValidationError

    async def stock(self: object, request: object) -> str:
        return "rendered"

    preprocess = _wrap_preprocess(check_request, 0, stock)
    server: Any = SimpleNamespace(
        model_config=model_config(RequestRules(explicit=True)), trust_request_mm_kwargs=False
    )
    with pytest.raises(VLLMValidationError, match="ignored at the top of a request"):
        preprocess(server, request(autoprune=ENTRY))
    answer: Any = preprocess(server, request(mm_processor_kwargs={"autoprune": ENTRY}))
    assert asyncio.run(answer) == "rendered"
