from __future__ import annotations

from pathlib import Path

import pytest

from vllm_autoprune.cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "atoms.md"


def test_reference_page_equals_the_registry(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["atoms", "--markdown"]) == 0
    stale = "run: vllm-autoprune atoms --markdown > docs/atoms.md"
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out, stale
