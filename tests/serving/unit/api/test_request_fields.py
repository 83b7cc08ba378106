from __future__ import annotations

import pytest

from vllm_autoprune import RequestError
from vllm_autoprune.serving.api import request_fields
from vllm_autoprune.serving.api.request_fields import (
    MAX_COUNTED,
    MAX_PROBLEMS,
    PruningRequest,
    SharedBudget,
    parse_request,
)
from vllm_autoprune.serving.shared.plan import CHOOSERS


def test_a_request_without_fields_gets_the_server_default() -> None:
    nothing = PruningRequest(budget=None, state=None, enabled=True, keep="state")
    assert parse_request(None) == parse_request({}) == nothing


def test_all_request_fields_are_parsed() -> None:
    for keep in CHOOSERS:
        asked = {"budget": 16, "keep": keep, "instructions": ["what?", ""]}
        request = parse_request(asked)
        assert (request.budget, request.keep, request.instructions) == (16, keep, ["what?", ""])


def test_details_have_one_level_or_none_for_each_image() -> None:
    assert parse_request({"details": ["low", "high", None]}).details == ["low", "high", None]
    assert parse_request({}).details is None


@pytest.mark.parametrize(
    ("asked", "read"), [(16, 16), ([16, 8], (16, 8)), ({"shared": 24}, SharedBudget(shared=24))]
)
def test_the_three_forms_of_a_budget(asked: object, read: object) -> None:
    assert parse_request({"budget": asked}).budget == read


def test_a_policy_is_a_name_or_an_unparsed_state() -> None:
    assert parse_request({"state": "visionzip"}).state == "visionzip"
    state = {"schema": "x", "name": [{"deep": None}]}
    assert parse_request({"state": state}).state == state
    assert not parse_request({"enabled": False}).enabled


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"budget": []}, "budget"),
        ({"budget": [8, True]}, "budget"),
        ({"budget": [8, None]}, "budget"),
        ({"budget": {}}, "budget"),
        ({"budget": {"shared": 1.0}}, "budget"),
        ({"budget": {"shared": 8, "by": "size"}}, "budget"),
        ({"budget": {"total": 8}}, "budget"),
        ({"state": 3}, "state"),
        ({"state": ["visionzip"]}, "state"),
        ({"enabled": "false"}, "enabled"),
        ({"enabled": 0}, "enabled"),
        ({"enabled": None}, "enabled"),
        ({"strange": 1}, "strange"),
        ({3: 1}, None),
        ({"budget": "16"}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": 16.0}, "budget"),
        ({"budget": True}, "budget"),
        ({"buget": 16}, "buget"),
        ({"keep": "best"}, "keep"),
        ({"keep": None}, "keep"),
        ({"instructions": "what?"}, "instructions"),
        ({"instructions": [1]}, "instructions/0"),
        ({"details": "low"}, "details"),
        ({"turns": [0, -1]}, "turns/1"),
        ({"turns": [True]}, "turns/0"),
        ({"details": ["low", 64]}, "details/1"),
        ({"details": ["auto"]}, "details/0"),
        ([16], None),
        (16, None),
        ("16", None),
        (True, None),
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


def test_a_misspelt_field_is_answered_with_its_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'budget'"):
        parse_request({"buget": 16})
    with pytest.raises(RequestError, match="use one of: budget, state"):
        parse_request({"colour": 16})


def test_all_problems_are_reported_in_one_error() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"budget": "x", "keep": "y", "z": 1})
    assert {p.where.rpartition("/")[2] for p in caught.value.problems} == {"budget", "keep", "z"}
    assert isinstance(caught.value, ValueError)  # vLLM answers those by 400


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
    monkeypatch.setattr(request_fields, "escape_unprintable", lambda *_: pytest.fail("a message"))
    with pytest.raises(RequestError, match=r"has 25\d problems"):
        parse_request(asked)


@pytest.mark.parametrize("key", ["a\nERROR forged line", "\x1b[2J", "\u2028", "x" * 10_000 + "\n"])
def test_an_unknown_key_is_reported_on_a_short_line(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({key: 1, "budget": {key: 2}})
    lines = str(caught.value).split("\n")
    assert len(lines) == 3  # the subject and two problems
    assert all(line.isprintable() and len(line) < 300 for line in lines)
