"""Tables and error messages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import JsonValue

from vllm_autoprune.cli.output import (
    CommandParser,
    error_record,
    format_error,
    format_table,
    format_value,
)
from vllm_autoprune.errors import Problem, SelectionError, StateError

ROOT = Path(__file__).resolve().parents[2]


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


def test_every_parser_states_defaults_and_answers_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = CommandParser(prog="measure")
    command = parser.add_subparsers().add_parser("users")
    command.add_argument("--count", type=int, default=7, help="number of users")
    with pytest.raises(SystemExit):
        parser.parse_args(["users", "--help"])
    assert "number of users (default: 7)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parser.parse_args(["users", "--count", "a"])
    assert capsys.readouterr().err.count("\n") == 1


def test_every_option_of_a_measurement_has_a_help_text() -> None:
    for folder in ("benchmarks", "tests/hostile", "tests/fuzz"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
                    given = {keyword.arg for keyword in call.keywords}
                    assert given & {"help", None}, f"{path}: {ast.unparse(call)}"
