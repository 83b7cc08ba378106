"""CPU time of other programs: what belongs to the test is not counted."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.load.foreign_load import (
    ForeignLoadWatch,
    find_listeners,
    is_own_address,
    list_cores,
    read_core_times,
)

SECONDS = 0.8
LOOP = f"import time; end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which another process of its own listens."""
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield int(process.stdout.readline())
        process.stdin.close()


def test_the_server_is_found_by_its_port(listener: int) -> None:
    (process,) = find_listeners(listener)
    assert process.ppid() == os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert [each.pid for each in find_listeners(own.getsockname()[1])] == [os.getpid()]


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.7", False), ("", False)]
)
def test_a_server_on_this_machine_is_known_by_its_address(host: str, own: bool) -> None:
    assert is_own_address(host) is own


def test_own_children_are_not_foreign_and_detached_programs_are(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other programs run here too, so machine and processes are read from made-up clocks.
    busy, own = [10.0, 13.0], [2.0, 4.5]
    monkeypatch.setattr(
        "benchmarks.load.foreign_load.read_core_times",
        lambda cores: (busy.pop(0), 100.0 if busy else 110.0),
    )
    monkeypatch.setattr(
        "benchmarks.load.foreign_load._seconds",
        lambda process: own[0] if process.pid == os.getpid() else 0.0,
    )
    watch = ForeignLoadWatch(f"http://127.0.0.1:{listener}")
    watch.start()
    own.pop(0)
    load = watch.stop()
    assert load is not None and load.server_here and load.server_known
    # Of ten seconds three were busy, and two and a half of them our own.
    assert load.share == pytest.approx(0.05)


def test_times_of_children_are_counted_while_they_run_and_after(listener: int) -> None:
    watch = ForeignLoadWatch(f"http://127.0.0.1:{listener}")
    before = sum(watch._read()[2].values())
    subprocess.run([sys.executable, "-c", LOOP], check=True)  # ended and reaped
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
    worker.start()
    try:
        seconds = sum(watch._read()[2].values()) - before
        assert worker.pid in watch._read()[2] or psutil.pid_exists(worker.pid or 0)
    finally:
        worker.terminate()
        worker.join()
    # The loop may have shared its core, so that it used less than its time; it used some of it.
    assert seconds > 0.1 * SECONDS


def test_a_server_elsewhere_is_not_looked_for() -> None:
    watch = ForeignLoadWatch("http://192.0.2.7:8000")
    watch.start()
    time.sleep(0.05)
    load = watch.stop()
    assert load is not None and not load.server_here and not load.server_known
    assert load.cores == len(list_cores())


def test_busy_time_is_part_of_the_total() -> None:
    busy, total = read_core_times(list_cores())
    assert 0 < busy <= total
