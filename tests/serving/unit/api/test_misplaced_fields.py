from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.samples import served
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api import misplaced_fields
from vllm_autoprune.serving.api.misplaced_fields import check_request, find_misplaced_field
from vllm_autoprune.serving.compat.api import _wrap_preprocess
from vllm_autoprune.serving.shared.request_rules import RequestRules
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE

ENTRY = {"budget": 16}


@pytest.mark.parametrize(
    ("extra", "kwargs", "where", "fix"),
    [
        ({"autoprune": ENTRY}, {}, "autoprune", '"mm_processor_kwargs": {"autoprune"'),
        ({"autoprune_budget": 16}, {}, "autoprune_budget", "mm_processor_kwargs"),
        ({"extra": 1}, {"budget": 16}, "mm_processor_kwargs/budget", "one level down"),
        ({}, {"state": "visionzip"}, "mm_processor_kwargs/state", "one level down"),
        ({}, {"auto_prune": ENTRY}, "mm_processor_kwargs/auto_prune", "'autoprune'"),
        ({}, {"autopurne": ENTRY}, "mm_processor_kwargs/autopurne", "'autoprune'"),
    ],
)
def test_a_field_in_the_wrong_place_is_named_with_the_right_one(
    extra: dict[str, object], kwargs: dict[str, object], where: str, fix: str
) -> None:
    problem = find_misplaced_field(extra, kwargs)
    assert problem is not None
    assert problem.where == where
    assert fix in problem.fix


def test_other_fields_are_left_alone() -> None:
    assert find_misplaced_field({"user_id": 1, "auto": 2}, {"autoprune": ENTRY}) is None
    assert find_misplaced_field({}, {"size": {"height": 1}, "do_resize": False}) is None


def test_few_names_are_compared_however_many_a_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(misplaced_fields, "_is_entry", compared.append)
    many = {f"autoprun{i}": i for i in range(5000)}
    assert find_misplaced_field(many, many) is None
    assert len(compared) == 2 * misplaced_fields.MAX_NAMES


def model_config(rules: RequestRules) -> Any:
    state = dataclasses.replace(served(), rules=rules)
    return SimpleNamespace(**{ATTRIBUTE: state})


def test_an_entry_that_no_flag_allows_is_answered_with_the_plugin_s_flag() -> None:
    default = model_config(RequestRules())
    with pytest.raises(RequestError, match="--autoprune-requests budget"):
        check_request(default, {}, {"autoprune": ENTRY}, False)
    check_request(default, {}, {"autoprune": ENTRY}, True)
    check_request(model_config(RequestRules(explicit=True)), {}, {"autoprune": ENTRY}, False)


def test_a_server_without_a_state_checks_nothing() -> None:
    check_request(SimpleNamespace(), {"autoprune": ENTRY}, {"budget": 3}, False)


@pytest.mark.compat
def test_vllm_s_own_request_is_refused_before_it_is_rendered() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    async def stock(self: object, request: object) -> str:
        return "rendered"

    preprocess = _wrap_preprocess(check_request, stock)
    server = SimpleNamespace(
        model_config=model_config(RequestRules(explicit=True)), trust_request_mm_kwargs=False
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    wrong = ChatCompletionRequest.model_validate({**body, "autoprune": ENTRY})
    with pytest.raises(VLLMValidationError, match="ignored at the top of a request"):
        preprocess(server, wrong)
    right = {**body, "mm_processor_kwargs": {"autoprune": ENTRY}}
    answer: Any = preprocess(server, ChatCompletionRequest.model_validate(right))
    assert asyncio.run(answer) == "rendered"
