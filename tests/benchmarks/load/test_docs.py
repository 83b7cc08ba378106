"""Commands in docs/benchmarks.md parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cost.__main__ import build_parser as build_cost_parser
from benchmarks.load import arguments
from benchmarks.load.__main__ import build_parser, parse_arguments

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def commands(program: str) -> list[str]:
    """Commands in the page's blocks of shell, without their continuation lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(f"python -m {program} ")]


@pytest.mark.parametrize("command", commands("benchmarks.load"))
def test_documented_load_commands_parse(command: str) -> None:
    parsed = build_parser().parse_args(shlex.split(command)[3:])
    if parsed.command == "paired" and "shape:" not in command:
        plan = arguments.parse_plan(parsed)
        assert len(plan.arms) == (2 if "--attach" in command else 3)


@pytest.mark.parametrize("command", commands("benchmarks.cost"))
def test_documented_cost_commands_parse(command: str) -> None:
    arguments = shlex.split(command)[3:]
    build_cost_parser(arguments[0]).parse_args(arguments)


def test_the_documented_file_of_options_parses(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(# load.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "load.yaml"
    path.write_text(block)
    plan = arguments.parse_plan(parse_arguments(["paired", "--config", str(path)]))
    assert len(plan.arms) == 2 and plan.rates == (2.0, 4.0, 8.0, 16.0)


def test_the_page_has_commands() -> None:
    assert len(commands("benchmarks.load")) >= 5 and len(commands("benchmarks.cost")) >= 3
