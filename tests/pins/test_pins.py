from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pins import table


@pytest.mark.slow
@pytest.mark.compat
def test_what_must_not_change_is_as_it_was() -> None:
    """Where a change is meant: ``python -m tests.pins write``, and the reason in the commit."""
    call = [sys.executable, "-m", "tests.pins", "check"]
    done = subprocess.run(
        call, cwd=table.ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr[-2000:]}"


def test_rows_that_differ_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "DATA", tmp_path)
    monkeypatch.setitem(
        table.TABLES, "sample", lambda: {"same": [0.5], "sum": [2, 0.6]}
    )
    (tmp_path / "sample.json").write_text('{\n"same": [0.5],\n"sum": [2, 0.5]\n}\n')
    lines = list(table.differences("sample"))
    assert lines == ['- sample: "sum": [2, 0.5]', '+ sample: "sum": [2, 0.6]']
