"""docs/cli.md: its calls parse, and its outputs are those of the commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.main import COMMANDS, main, parser

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
