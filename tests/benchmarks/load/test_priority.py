from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import benchmarks.load.priority as module
from benchmarks.load.priority import NICE, describe_priority, raise_priority

TELL = "from benchmarks.load.priority import describe_priority; print(describe_priority())"
REAL_TIME = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
RAISED = "import os; os.setpriority(os.PRIO_PROCESS, 0, -1)"


def told(before: Callable[[], None] | None = None) -> str:
    return subprocess.run(
        [sys.executable, "-c", TELL],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
        preexec_fn=before,
    ).stdout.strip()


def allowed(what: str) -> bool:
    return subprocess.run([sys.executable, "-c", what], capture_output=True).returncode == 0


def test_real_time_scheduling_is_preferred() -> None:
    as_usual, first = told(), told(raise_priority)
    if allowed(REAL_TIME):
        assert first == "real time" != as_usual
    elif not allowed(RAISED):
        assert first == as_usual


def test_nice_values_are_lowered_if_real_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    as_usual, first = told(), told(raise_priority)
    if not allowed(RAISED):
        assert first == as_usual
        return
    assert first.startswith(f"nice {NICE}") and first != as_usual
    if "session" in first:  # a kernel that groups by session; every started process is in one
        assert first == f"nice {NICE}, session {NICE}"
        assert as_usual.endswith("session 0")


@pytest.mark.parametrize(
    ("group", "tells"),
    [
        ("/autogroup-801 nice 3\n", ", session 3"),
        ("", ""),  # a process in no group
        (None, ""),  # a kernel without groups
    ],
)
def test_without_autogroups_only_the_nice_value_is_reported(
    group: str | None, tells: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by_kernel = tmp_path / "autogroup"
    if group is not None:
        told_by_kernel.write_text(group)
    monkeypatch.setattr(module, "_SESSION", told_by_kernel)
    assert describe_priority() == f"nice {os.getpriority(os.PRIO_PROCESS, 0)}{tells}"


def test_other_processes_keep_their_priority() -> None:
    before = describe_priority()
    told(raise_priority)
    assert describe_priority() == before == describe_priority()
    assert f"nice {os.getpriority(os.PRIO_PROCESS, 0)}" in before
