"""Both of vLLM's model runners keep the same tokens and give the same answers.

Every scenario's whole report is compared: tokens kept, answers, prompt lengths, hits of the prefix
cache, how often the vision tower ran, fallbacks, refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

SCENARIOS = (
    *("plain", "everything_kept", "whole_prefill", "chunked_prefill", "no_caches"),
    *("interleaved", "batches", "every_kind", "hostile"),
)
LIKE_ANOTHER = (
    *("instruction_left_out", "blind_state", "embeddings_for_relevance", "request_states"),
    "base_policies",
)
"""Differ from the scenarios above in what the API server and the selection do, the same code for
both model runners."""
TIMED = frozenset({"exported"})
"""Scenarios whose reports contain times, which differ between runs."""

CLOSE = 3e-2
"""Tolerance between sums of log-probabilities, which the runners add in different orders."""


def apart(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Paths at which two reports differ."""
    if isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > CLOSE:
            yield f"{where}: {one} and {other}"
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one.keys() - TIMED:
            yield from apart(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from apart(*pair, f"{where}/{i}")
    elif one != other:
        yield f"{where}: {one} and {other}"


@pytest.mark.scenarios("{name}")
@pytest.mark.parametrize(
    "name",
    [*SCENARIOS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LIKE_ANOTHER)],
)
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_reports_of_both_runners_are_equal(runner: Runner, name: str) -> None:
    assert list(apart(Runner("v1").run(name), runner.run(name))) == []


def test_differences_are_detected() -> None:
    report = {"kept": [[1, 2], [3]], "logprob": -1.0, "exported": "1 s", "text": "red"}
    same = {**report, "logprob": -1.02, "exported": "2 s"}
    assert list(apart(report, same)) == []
    for change in ({"kept": [[1, 2], [4]]}, {"kept": [[1, 2]]}, {"logprob": -1.1}, {"text": "a"}):
        assert len(list(apart(report, {**same, **change}))) == 1
    assert len(list(apart(report, {**same, "more": 1}))) == 1
