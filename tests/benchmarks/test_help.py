"""Commands of the repository beside `vllm-autoprune`: their help, which measures nothing."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.common.command import run_command
from benchmarks.search.__main__ import main as search

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    path.relative_to(ROOT)
    for folder in ("benchmarks", "scripts", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_help_is_all_that_is_printed(
    command: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(command), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / command), run_name="__main__")
    assert ended.value.code == 0
    assert sys.float_info.min / 2 > 0, "the processor keeps its mode of rounding"
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize(
    "command", [path for path in COMMANDS if path.parts[0] == "benchmarks"], ids=str
)
def test_a_full_disk_is_told_in_one_line(
    command: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(command), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / command), run_name="__main__")
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "standard output: cannot be written (No space left on device)" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("count", [10, 100_000], ids=["buffered", "written at once"])
def test_output_and_files_that_fail_are_told_after_the_work(
    count: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        Path("/dev/full").write_text("x" * count)

    assert run_command("work", write) == 1
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command("work", lambda: print("x" * count)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"work: .*output.* cannot be written \(No space left on device\) -> .+",
            line,
        )


def test_a_folder_without_searches_has_no_tables(
    tmp_path: Path, capsys: Captured
) -> None:
    assert search(["table", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out and "has no results.jsonl with the results" in printed.err
