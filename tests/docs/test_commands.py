"""The commands of README.md and docs/ are typed as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs_commands import (
    QUICK,
    SERVER,
    Command,
    prepare_folder,
    read_commands,
    type_quick,
    type_with_server,
)

COMMANDS = read_commands()
QUICK_ONES = list({c.text: c for c in COMMANDS if c.kind == QUICK}.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    prepare_folder(path)
    return path


def test_every_command_is_typed_or_says_why_not() -> None:
    assert len(COMMANDS) > 60
    assert len(QUICK_ONES) >= 8
    assert sum(command.kind == SERVER for command in COMMANDS) >= 4


def test_a_new_kind_of_command_is_noticed() -> None:
    with pytest.raises(ValueError, match="nothing says how to type"):
        _ = Command("docs/new.md", "frobnicate --now").kind


@pytest.mark.parametrize("command", QUICK_ONES, ids=lambda command: command.text[:60])
def test_quick_commands_succeed(command: Command, folder: Path) -> None:
    assert type_quick(command, folder) == 0


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_commands_that_need_the_server_of_the_first_page_succeed(folder: Path) -> None:
    assert type_with_server([c for c in COMMANDS if c.kind == SERVER], folder) == []
