"""Every command: help, errors, tables, and the calls of docs/cli.md."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.main import COMMANDS, main, parser
from vllm_autoprune.cli.output import error_record, format_error, format_table
from vllm_autoprune.errors import Problem, SelectionError, StateError

ROOT = Path(__file__).resolve().parents[2]

Captured = pytest.CaptureFixture[str]


def test_a_table_is_aligned_and_its_widest_columns_are_broken_into_lines() -> None:
    rows = [["a", "1"], ["bcdefg", "22"], ["", "x"]]
    lines = format_table(["name", "n"], rows, "<>").splitlines()
    assert lines == ["name     n", "------  --", "a        1", "bcdefg  22", "         x"]
    words = "word " * 30
    text = format_table(["key", "a", "b"], [["x", words, "short"], ["y", "1", words]], wrap=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and text.count("word") == 60
    assert lines[2].startswith("x    word")


def test_one_problem_is_one_line_and_several_are_a_list() -> None:
    problem = Problem("/budget", "wrong", "fix it")
    error = StateError("state x", [problem])
    assert format_error(error) == "state x: /budget: wrong -> fix it"
    assert len(format_error(StateError("state x", [problem] * 2)).splitlines()) == 3
    assert error_record(error) == {
        "error": "StateError",
        "message": "state x: /budget: wrong -> fix it",
        "problems": [{"where": "/budget", "what": "wrong", "fix": "fix it"}],
    }
    assert error_record(SelectionError("no"))["problems"] == []


PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_the_page_names_every_command_and_backbone() -> None:
    assert [name for name in COMMANDS if f"`{name}" not in PAGE] == []
    assert [name for name in BACKBONE_SHAPES if f"`{name}`" not in PAGE] == []


def test_the_costs_on_the_page_are_what_is_printed(capsys: Captured) -> None:
    (call,) = re.findall(r"```sh\nvllm-autoprune (cost .*?)```", PAGE, flags=re.DOTALL)
    assert main(shlex.split(call)) == 0
    assert f"```text\n{capsys.readouterr().out}```" in PAGE


def test_every_shipped_state_is_valid(capsys: Captured) -> None:
    files = [str(f) for f in sorted((ROOT / "policies").glob("*.json"))]
    assert files
    assert main(["validate", *files, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["source"] for r in results] == files
    assert all(len(r["verdicts"]) == 5 for r in results)


def test_a_bad_state_is_reported_and_fails(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"schema": "autoprune-state/1", "name": "x"}')
    assert main(["validate", str(file), "autoprune"]) == 1
    output = capsys.readouterr().out
    assert "/budget: required but missing" in output
    assert "autoprune: valid, K = 32" in output
    assert main(["validate", "autoprune", "--budget", "0"]) == 1
    assert "K = 0" in capsys.readouterr().out


def test_schema_and_atoms_are_json(capsys: Captured) -> None:
    assert main(["schema"]) == 0
    assert "constraints" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["atoms", "--json"]) == 0
    atoms = json.loads(capsys.readouterr().out)
    budgets = [a for a in atoms if a["group"] == "budget_control" and a["origin"] == "printed"]
    assert len(budgets) == 10
    assert main(["atoms", "--group", "safety_checks", "--json"]) == 0
    assert {a["group"] for a in json.loads(capsys.readouterr().out)} == {"safety_checks"}
    assert main(["atoms"]) == 0
    assert "local_contrast_saliency" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_json_output_and_the_defaults(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--json" in text and COMMANDS[command].help[1:] in text
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command]._actions:
        told = action.default in (None, False, argparse.SUPPRESS, (), [])
        if action.option_strings and not told:
            flag = action.option_strings[-1]
            assert "default" in text.rpartition(f"{flag} ")[2].partition(" --")[0], flag


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from vllm_autoprune_command import main; sys.argv = ['x', '--version']; main()",
         {"torch", "vllm_autoprune"}),
        ("from vllm_autoprune.cli.main import main; main(['atoms'])",
         {"vllm", "transformers", "PIL", "matplotlib"}),
    ],
)  # fmt: skip
def test_starting_loads_nothing_heavy(code: str, heavy: set[str]) -> None:
    code = f"import sys; {code}; print(sorted({heavy!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip
    lines = ran.stdout.splitlines()
    assert lines[-1] == "[]" and ("atoms" in code or lines[0] == version("vllm-autoprune"))


def test_a_closed_pipe_is_no_error() -> None:
    run = f"{sys.executable} -m vllm_autoprune.cli.main schema | head -c 10"
    ran = subprocess.run(run, shell=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout == '{\n  "$defs"'[:10]
    assert ran.stderr == ""
