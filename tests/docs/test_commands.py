"""The commands of README.md and docs/ are typed as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts.docs_commands import (
    LONG,
    QUICK,
    Command,
    prepare_folder,
    read_commands,
    type_page,
    type_quick,
)
from vllm_autoprune.cli.main import parser

COMMANDS = read_commands()
LONG_ONES = [c for c in COMMANDS if c.kind == LONG]
QUICK_ONES = list({c.text: c for c in COMMANDS if c.kind == QUICK}.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    prepare_folder(path)
    return path


def test_every_command_is_typed_or_says_why_not() -> None:
    assert len(COMMANDS) > 60
    assert len(QUICK_ONES) >= 8
    assert sum(command.kind == LONG for command in COMMANDS) >= 30


def test_every_call_of_the_command_parses() -> None:
    calls = [c.text for c in COMMANDS if re.match("vllm-autoprune [a-z]", c.text)]
    assert len(calls) > 20
    for call in calls:
        parser().parse_args(shlex.split(call)[1:])


def test_a_new_kind_of_command_is_noticed() -> None:
    with pytest.raises(ValueError, match="nothing says how to type"):
        _ = Command("docs/new.md", "frobnicate --now").kind


@pytest.mark.parametrize("command", QUICK_ONES, ids=lambda command: command.text[:60])
def test_quick_commands_succeed(command: Command, folder: Path) -> None:
    assert type_quick(command, folder) == 0


def test_options_with_which_a_command_measures_less_come_last() -> None:
    loop = Command("docs/new.md", "for n in 1 2; do python -m benchmarks.cost efficiency; done")
    assert loop.typed.endswith("efficiency --requests 1 --policies cdpruner; done")
    assert Command("docs/new.md", "curl localhost:8000/metrics").typed.endswith("/metrics")


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("page", list(dict.fromkeys(c.page for c in LONG_ONES)))
def test_long_commands_of_a_page_succeed_in_order(page: str, folder: Path) -> None:
    ones = [command for command in LONG_ONES if command.page == page]
    failures = {c.text: failure for c, _, failure in type_page(ones, folder) if failure}
    assert failures == {}
