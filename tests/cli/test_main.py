"""Every command: help, errors, tables, and the calls of docs/cli.md."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from pydantic import JsonValue

from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.main import COMMANDS, main, parser
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


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()

CALLS = [
    shlex.split(block.replace("\\\n", " "))[1:]
    for block in re.findall(r"```sh\n(vllm-autoprune .*?)```", PAGE, flags=re.DOTALL)
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_every_call_on_the_page_parses(call: list[str]) -> None:
    assert parser().parse_args(call).command == call[0]


def test_every_command_is_documented() -> None:
    assert len(CALLS) >= 4
    assert all(f"`{name}" in PAGE for name in COMMANDS)


def test_the_costs_on_the_page_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (call,) = [call for call in CALLS if call[0] == "cost"]
    assert main(call) == 0
    assert f"```text\n{capsys.readouterr().out}```" in PAGE


def test_backbones_are_those_of_the_code() -> None:
    assert all(f"`{name}`" in PAGE for name in BACKBONE_SHAPES)


def test_every_shipped_state_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(f) for f in sorted((ROOT / "policies").glob("*.json"))]
    assert files
    assert main(["validate", *files, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["source"] for r in results] == files
    assert all(len(r["verdicts"]) == 5 for r in results)


def test_a_bad_state_is_reported_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"schema": "autoprune-state/1", "name": "x"}')
    assert main(["validate", str(file), "autoprune"]) == 1
    output = capsys.readouterr().out
    assert "/budget: required but missing" in output
    assert "autoprune: valid, K = 32" in output


def test_a_budget_is_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "autoprune", "--budget", "0"]) == 1
    assert "K = 0" in capsys.readouterr().out


def test_schema_and_atoms_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert "constraints" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["atoms", "--json"]) == 0
    atoms = json.loads(capsys.readouterr().out)
    budgets = [a for a in atoms if a["group"] == "budget_control" and a["origin"] == "printed"]
    assert len(budgets) == 10
    assert main(["atoms"]) == 0
    assert "local_contrast_saliency" in capsys.readouterr().out


def test_wrong_arguments_exit_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["validate"])
    assert caught.value.code == 2


def test_a_misspelt_command_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["valdate"]) == 2
    output = capsys.readouterr().err
    assert "did you mean 'validate'?" in output and output.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json_output(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "--json" in output and COMMANDS[command].help[1:] in " ".join(output.split())


def options() -> list[tuple[str, argparse.Action]]:
    """Every option of every command that has a default worth telling."""
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [
        (name, action)
        for name, command in commands.choices.items()
        for action in command._actions
        if action.option_strings and action.default not in (None, False, argparse.SUPPRESS, (), [])
    ]


def test_every_help_states_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    texts: dict[str, str] = {}
    for command in {command for command, _ in options()}:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        texts[command] = " ".join(capsys.readouterr().out.split())
    for command, action in options():
        flag = action.option_strings[-1]
        entry = texts[command].rpartition(f"{flag} ")[2].partition(" --")[0]
        assert "default" in entry, (command, flag, entry)
    assert len(options()) >= 5


def test_the_version_is_printed_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['vllm-autoprune', '--version']; "
        "from vllm_autoprune_command import main; assert main() == 0; "
        "print(sorted({'torch', 'vllm_autoprune'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert ran.stdout.split() == [version("vllm-autoprune"), "[]"]


def test_starting_loads_neither_server_nor_model_nor_pictures() -> None:
    code = (
        "import sys; from vllm_autoprune.cli.main import main; main(['atoms']); "
        "print(sorted({'vllm', 'transformers', 'PIL', 'matplotlib'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_error() -> None:
    run = f"{sys.executable} -m vllm_autoprune.cli.main schema | head -c 10"
    ran = subprocess.run(run, shell=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout == '{\n  "$defs"'[:10]
    assert ran.stderr == ""


def test_atoms_of_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atoms", "--group", "safety_checks", "--json"]) == 0
    assert {a["group"] for a in json.loads(capsys.readouterr().out)} == {"safety_checks"}
