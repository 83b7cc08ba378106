"""The day on a rented GPU: deadlines, results after every step, runs that go on after a kill."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.cost.__main__ import parse_arguments
from scripts import gpu_day
from scripts.gpu_day import STEPS, Day, Result, Step

ROOT = Path(__file__).resolve().parents[1]
WAIT = (
    'echo {name} >> "$OUT/../ran"; '
    '[ -e "$OUT/../go-{name}" ] || {{ touch "$OUT/../at-{name}"; setsid -w sleep 300; }}'
)
"""A step that starts a server in a session of its own and waits, until it may pass."""


def plan_day(out: Path, **commands: str) -> Day:
    return Day(commands, dict.fromkeys(commands, 60.0), out, {})


def read_results(out: Path) -> dict[str, Result]:
    """Results of a run of the script with tiny models."""
    return plan_day(out, **{step.name: step.tiny for step in STEPS}).read()


def run_script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/gpu_day.sh"), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_day_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Killed in its first step, in its second and in its last; the servers end with it."""
    names = ("first", "second", "last")
    commands = {name: WAIT.format(name=name) for name in names}
    day = plan_day(tmp_path, **commands)
    code = f"from tests.test_gpu_day import *; plan_day(Path({str(tmp_path)!r}), **{commands!r})"
    for name in names:
        process = subprocess.Popen([sys.executable, "-c", f"{code}.run(60)"], cwd=ROOT)
        while not (tmp_path / f"at-{name}").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        (tmp_path / f"go-{name}").touch()
    assert set(day.read()) == {"first", "second"}
    assert list(day._find_processes()) != []
    assert day.run(60)
    assert list(day._find_processes()) == []
    ran = (tmp_path / "ran").read_text().split()
    assert ran == ["first", "first", "second", "second", "last", "last"]


def test_a_step_that_fails_or_is_late_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"broken": "false; echo unseen", "slow": "echo row; sleep 300"}
    day = plan_day(tmp_path, **commands, good="echo 3.5 ms; echo why >&2")
    day = Day(day.steps, {**day.deadlines, "slow": 1.0}, day.out, {})
    assert not day.run(60)
    statuses = {name: result.status for name, result in day.read().items()}
    assert statuses == {"broken": "failed", "slow": "late", "good": "passed"}
    report = (tmp_path / "report.md").read_text()
    assert "| slow | late | 1 |" in report and "\nrow\n" in report
    assert "3.5 ms" in report and "\nunseen" not in report
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert "gpu-day/good/log.txt" in archive.getnames()
    assert "gpu_day: good: passed" in capsys.readouterr().out
    assert day.plan() == ["broken", "slow"], "repeated by the next run"


def test_no_step_is_started_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is git needed, which a bare machine lacks."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    day = plan_day(tmp_path, step="true")
    assert not day.run(gpu_day._SHORTEST - 1)
    assert (
        day.read() == {}
        and "| step | not run |" in (tmp_path / "report.md").read_text()
    )
    assert day.run(60)
    assert plan_day(tmp_path, step="echo other").plan() == ["step"], "another command"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_benchmarks_take_the_options_of_a_step(step: Step) -> None:
    for command in (step.command, step.tiny):
        _, separator, words = command.partition(" -m benchmarks.cost ")
        if separator:
            options = parse_arguments(shlex.split(words))
            assert str(options.out) == "$OUT" and options.command == step.name


def test_a_bare_machine_is_told_what_to_install(tmp_path: Path) -> None:
    """Without a compiler, packages are named; root gets them installed."""
    for name in ("dirname", "grep"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    for name in ("id", "apt-get"):
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path), "PYTHON": ""}
    done = run_script("--help", **path)
    assert done.returncode == 1 and "sudo apt-get install gcc python3" in done.stderr
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    done = run_script("--help", **path)
    assert "name one: PYTHON=" in done.stderr
    assert "python3-dev python3-venv" in (tmp_path / "called").read_text()


def test_the_script_runs_the_interpreter_that_it_is_told() -> None:
    done = run_script("--help", PYTHON=sys.executable)
    assert done.returncode == 0 and "--minutes" in done.stdout


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_every_step_passes_on_a_cpu(tmp_path: Path) -> None:
    words = ["--tiny", "--python", sys.executable, "--minutes", "110"]
    done = run_script(*words, "--out", str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout[-4000:]
    statuses = {name: result.status for name, result in read_results(tmp_path).items()}
    assert statuses == {step.name: "passed" for step in STEPS if step.name != "install"}
    report = (tmp_path / "report.md").read_text()
    for file in (
        "efficiency/mini-llava.json",
        "curve/points.jsonl",
        "photo/photo.json",
    ):
        assert (tmp_path / file).stat().st_size > 0
    assert "| API servers |" in report and "| peak memory, MiB |" in report


def test_the_page_names_every_step() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert [step.name for step in STEPS if f"`{step.name}`" not in page] == ["machine"]
