from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.states.rules import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "atoms.md"


def test_reference_page_equals_the_registry(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["atoms", "--markdown"]) == 0
    stale = "run: vllm-autoprune atoms --markdown > docs/atoms.md"
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out, stale


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_schema_file_equals_the_command_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schema"]) == 0
    copy = (DOCS / "autoprune-state-1.schema.json").read_text(encoding="utf-8")
    stale = "run: vllm-autoprune schema > docs/autoprune-state-1.schema.json"
    assert copy == capsys.readouterr().out, stale


def test_the_page_lists_every_rule_beyond_the_schema() -> None:
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert listed == [(rule.kind, rule.requires, rule.why) for rule in RULES.values()]
