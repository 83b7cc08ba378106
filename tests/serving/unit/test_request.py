from __future__ import annotations

import pytest

from vllm_autoprune import RequestError
from vllm_autoprune.serving.plan import KEEPS
from vllm_autoprune.serving.request import PruningRequest, read_request


def test_nothing_asked_is_the_server_s_own_choice() -> None:
    nothing = PruningRequest(budget=None, keep="state", instructions=None)
    assert read_request(None) == read_request({}) == nothing


def test_everything_asked_is_read() -> None:
    for keep in KEEPS:
        asked = {"budget": 16, "keep": keep, "instructions": ["what?", ""]}
        found = read_request(asked)
        assert (found.budget, found.keep, found.instructions) == (16, keep, ["what?", ""])


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"budget": "16"}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": 16.0}, "budget"),
        ({"budget": True}, "budget"),
        ({"buget": 16}, "buget"),
        ({"keep": "best"}, "keep"),
        ({"keep": None}, "keep"),
        ({"instructions": "what?"}, "instructions"),
        ({"instructions": [1]}, "instructions/0"),
        ([16], None),
        (16, None),
        ("16", None),
        (True, None),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_its_place(asked: object, where: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(asked)
    (problem,) = caught.value.problems
    entry = "mm_processor_kwargs/autoprune"
    assert problem.where == (entry if where is None else f"{entry}/{where}")
    assert problem.mend


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        read_request({"budget": "x", "keep": "y", "z": 1})
    assert {p.where.rpartition("/")[2] for p in caught.value.problems} == {"budget", "keep", "z"}
    assert isinstance(caught.value, ValueError)  # vLLM answers those by 400
