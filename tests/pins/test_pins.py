from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pins import table
from tests.pins.mutants import mutants_of


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.timeout(900)
def test_what_must_not_change_is_as_it_was() -> None:
    """Where a change is meant: ``python -m tests.pins write``, and the reason in the commit."""
    call = [sys.executable, "-m", "tests.pins", "check"]
    done = subprocess.run(call, cwd=table.ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr[-2000:]}"


def test_rows_that_differ_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: table.Table = {"same": [0.5, "x"], "gone": {"a": 1}, "sum": [2, 0.5], "part": {"b": 1}}
    monkeypatch.setattr(table, "DATA", tmp_path)
    monkeypatch.setitem(table.TABLES, "sample", lambda: rows)
    table.write("sample")
    rows = {"same": [0.5, "x"], "new": None, "sum": [2, 0.6], "part": {"b": 1, "c": 2}}
    shown = ['- gone: {"a": 1}', "+ new: null", '- part: {"b": 1}', '+ part: {"c": 2}']
    shown += ["- sum: [0.5]", "+ sum: [0.6]"]
    assert [line.replace("sample: ", "") for line in table.differences("sample")] == shown


def test_mutants_of_a_function() -> None:
    text = "def f(a: int = 1):\n    if a < 1:\n        g(f'{a - 1}')\n    return a\n"
    mutants = {mutant.mutant for _, mutant in mutants_of("f.py", text) if mutant.function == "f"}
    conditions = {"if not a < 1:", "if a <= 1:", "if a < 2:", "if a < 0:"}
    defaults = {"def f(a: int = 2):", "def f(a: int = 0):"}
    assert mutants == conditions | defaults | {"pass", "return None"}
