from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.load.first import NICE, come_first, priority

TELL = "from benchmarks.load.first import priority; print(priority())"
RAISE = "import os; os.setpriority(os.PRIO_PROCESS, 0, -1)"


def told(before: Callable[[], None] | None = None) -> str:
    return subprocess.run(
        [sys.executable, "-c", TELL],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
        preexec_fn=before,
    ).stdout.strip()


def test_a_client_comes_first_where_the_system_lets_it() -> None:
    allowed = subprocess.run([sys.executable, "-c", RAISE], capture_output=True).returncode == 0
    as_usual, first = told(), told(come_first)
    if not allowed:
        assert first == as_usual
        return
    assert first.startswith(f"nice {NICE}") and first != as_usual
    if os.access("/proc/self/autogroup", os.W_OK):
        assert first == f"nice {NICE}, session {NICE}"
        assert as_usual.endswith("session 0")


def test_nobody_else_is_moved() -> None:
    before = priority()
    told(come_first)
    assert priority() == before == priority()
    assert f"nice {os.getpriority(os.PRIO_PROCESS, 0)}" in before
