"""The page on choosing a state: its figures are those of the command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts.docs_commands import read_commands
from tests.test_advise import recorded
from vllm_autoprune.advise import WAYS
from vllm_autoprune.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")


def test_the_output_on_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = {command.text for command in read_commands() if "--layer-ms" in command.text}
    call = shlex.split(text)[1:]
    assert main(call) == 0
    (block,) = re.findall(r"```text\n(Pruning .*?)```", PAGE, flags=re.DOTALL)
    assert block in capsys.readouterr().out


def test_every_way_is_named() -> None:
    assert [way for way in WAYS if f"\n| {way} | " not in PAGE] == []


def test_predictions_on_the_page_are_the_models() -> None:
    ways = recorded(256)
    stock, reading, split = ways["stock"], ways["question-reading"], ways["split"]
    assert f"first, question-reading | {reading.ratio:.2f} |" in PAGE
    assert f"questions an image | {reading.advantage(stock).upper:.1f} |" in PAGE
    assert f"first, split, K_c = 256 | {split.ratio:.2f} |" in PAGE
    assert f"split, K_c = 256 | {split.advantage(stock).upper:.0f} |" in PAGE
