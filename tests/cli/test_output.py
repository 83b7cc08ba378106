"""Tables and error messages."""

from __future__ import annotations

from pydantic import JsonValue

from vllm_autoprune.cli.output import error_record, format_error, format_table, format_value
from vllm_autoprune.errors import Problem, SelectionError, StateError


def test_columns_are_aligned() -> None:
    assert format_table(["name", "n"], [["a", "1"], ["bcdefg", "22"]], "<>").splitlines() == [
        "name     n",
        "------  --",
        "a        1",
        "bcdefg  22",
    ]


def test_the_widest_columns_are_broken_into_lines() -> None:
    long = " ".join(["word"] * 30)
    text = format_table(["key", "a", "b"], [["x", long, "short"], ["y", "1", long]], wrap=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert text.count("word") == 60
    assert lines[2].startswith("x    word")


def test_a_cell_without_text_keeps_its_place() -> None:
    assert format_table(["a", "b"], [["", "x"]]).splitlines()[2] == "   x"


def test_one_problem_is_one_line_and_several_are_a_list() -> None:
    one = Problem("/budget", "wrong", "fix it")
    assert format_error(StateError("state x", [one])) == "state x: /budget: wrong -> fix it"
    assert len(format_error(StateError("state x", [one, one])).splitlines()) == 3
    assert format_error(SelectionError("does not fit")) == "does not fit"
    assert error_record(StateError("state x", [one])) == {
        "error": "StateError",
        "message": "state x: /budget: wrong -> fix it",
        "problems": [{"where": "/budget", "what": "wrong", "fix": "fix it"}],
    }


def test_values_are_shown_as_json_but_strings_bare() -> None:
    values: list[JsonValue] = ["a b", None, True, {"a": 1}]
    assert [format_value(value) for value in values] == ["a b", "null", "true", '{"a": 1}']
