"""The page on choosing a state: its calls parse, and its figures are those of the command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.test_advise import recorded
from vllm_autoprune.advise import WAYS
from vllm_autoprune.cli.main import main, parser

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
CALLS = [
    shlex.split(block.replace("\\\n", " "))[1:]
    for block in re.findall(r"```sh\n(vllm-autoprune .*?)```", PAGE, flags=re.DOTALL)
]


def test_every_call_parses() -> None:
    assert len(CALLS) == 3
    assert {parser().parse_args(call).command for call in CALLS} == {"advise"}


def test_the_output_on_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (call,) = [call for call in CALLS if "--layer-ms" in call]
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
