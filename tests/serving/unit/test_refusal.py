"""Refused requests: what programs read of them, beside the message."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.serving.unit.sender import LARGE, Sender, read_refused
from tests.tables import parametrize_from_file
from vllm_autoprune.errors import Problem, RequestError, StateError
from vllm_autoprune.serving.api.refusal import RefusedRequest, refusing_requests
from vllm_autoprune.serving.request_rules import RequestRules


def test_an_error_of_ours_is_one_of_vllms_with_the_same_message() -> None:
    problems = [Problem("/a", "is b", "write c", "value"), Problem("/d", "is e")]
    with pytest.raises(VLLMValidationError) as caught, refusing_requests():
        raise StateError("state", problems)
    error = caught.value
    assert isinstance(error, RefusedRequest) and isinstance(error, RequestError)
    assert error.problems == tuple(problems)
    assert str(error) == str(StateError("state", problems))
    assert error.parameter == "/a#value"


def test_a_problem_without_a_kind_has_its_place_and_other_errors_pass() -> None:
    error = RefusedRequest("request", [Problem("/a", "is b")])
    assert error.parameter == "/a#"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.parameter) == (str(error), "/a#")
    with pytest.raises(TypeError, match="ours"), refusing_requests():
        raise TypeError("ours")


@parametrize_from_file("level", "fields", "kind", "reason")
def test_a_refused_request_says_its_kind(
    sender: Sender, level: str, fields: dict[str, Any], kind: str, reason: str
) -> None:
    """In its error, and in a metric whose labels are there from the start and never more."""
    folder = sender._config.model
    rules = RequestRules(level, 2, 256, explicit=True)  # type: ignore[arg-type]
    before = read_refused()
    with pytest.raises(RefusedRequest) as caught:
        Sender(folder, budget=8, rules=rules).send([LARGE], **fields)
    (name,) = fields
    where, _, said = caught.value.parameter.partition("#")
    assert where.startswith(f"mm_processor_kwargs/autoprune/{name}")
    assert said == kind
    assert read_refused() == {**before, reason: before[reason] + 1}
