"""The load client: its schedule, how it paces requests, its priority."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gevent
import numpy as np
import pytest
from gevent.event import Event

import benchmarks.load.client as module
from benchmarks.common import BenchmarkError
from benchmarks.load.client import NICE, describe_priority, open_loop, raise_priority
from benchmarks.load.schedule import Load, draw_arrivals

TELL = "from benchmarks.load.client import describe_priority; print(describe_priority())"
REAL_TIME = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
RAISED = "import os; os.setpriority(os.PRIO_PROCESS, 0, -1)"


def test_a_poisson_schedule_has_its_rate_and_exponential_gaps() -> None:
    gaps = np.diff(draw_arrivals(20_000, 5.0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gamma_distribution(
    burstiness: float, variation: float
) -> None:
    gaps = np.diff(draw_arrivals(20_000, 5.0, burstiness))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_the_seed_fixes_the_pattern_at_every_rate() -> None:
    slow, fast = draw_arrivals(50, 1.0, seed=3), draw_arrivals(50, 4.0, seed=3)
    assert np.allclose(slow, 4 * fast)
    assert not np.allclose(slow, draw_arrivals(50, 1.0, seed=4))
    assert (np.diff(slow) > 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_measured_requests_come_at_exactly_the_rate(burstiness: float, seed: int) -> None:
    load = Load(rate=6.0, burstiness=burstiness, seed=seed)
    due = load.due(100)
    measured = [at for at, phase in zip(due, load.phases(100), strict=True) if phase == "measured"]
    assert len(measured) == 95
    assert (len(measured) - 1) / (measured[-1] - measured[0]) == pytest.approx(6.0)
    assert len(due) / due[-1] == pytest.approx(6.0)
    assert (np.diff(due) >= 0).all()


@pytest.mark.parametrize(
    ("count", "rate", "burstiness", "named"),
    [(0, 1.0, 1.0, "requests"), (5, 0.0, 1.0, "rate"), (5, 1.0, -1.0, "burstiness")],
)
def test_empty_and_endless_schedules_are_refused(
    count: int, rate: float, burstiness: float, named: str
) -> None:
    with pytest.raises(BenchmarkError, match=f"schedule is empty or has no end: {named}"):
        draw_arrivals(count, rate, burstiness)


def test_phases_exclude_ramp_and_drain() -> None:
    closed = Load(users=3).phases(20)
    assert closed == ["ramp"] * 3 + ["measured"] * 14 + ["drain"] * 3
    assert Load(rate=2.0).phases(40) == ["ramp"] * 2 + ["measured"] * 38
    # Where nothing would be left, everything counts.
    assert Load(users=16).phases(20) == ["measured"] * 20


def test_a_load_has_either_a_rate_or_users() -> None:
    with pytest.raises(ValueError, match="open loop"):
        Load()
    with pytest.raises(ValueError, match="open loop"):
        Load(rate=1.0, users=2)
    assert Load(users=2).due(3) == [0.0, 0.0, 0.0]
    assert Load(rate=1.0).describe() == "open loop, Poisson arrivals at 1 request/s"
    assert Load(users=1).describe() == "closed loop, 1 user"
    assert Load(rate=2.0).describe() == "open loop, Poisson arrivals at 2 requests/s"


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Coordinated omission: requests behind a slow answer go out when due all the same."""
    begin, sent = time.perf_counter(), list[tuple[int, float, float]]()

    def now() -> float:
        return time.perf_counter() - begin

    def send(item: int, at: float) -> None:
        sent.append((item, at, now()))
        gevent.sleep(0.3)

    due = [(n, 0.02 * n) for n in range(10)]
    assert open_loop(due, now, send, Event(), most=64) is None
    assert [(item, at) for item, at, _ in sent] == due
    assert all(at <= started < at + 0.25 for _, at, started in sent)
    assert now() >= 0.48  # it waited for the last answer


def test_an_open_loop_ends_where_too_many_requests_are_in_flight() -> None:
    sent = list[int]()

    def send(item: int, at: float) -> None:
        sent.append(item)
        gevent.sleep(0.05)

    stop = Event()
    problem = open_loop([(n, 0.0) for n in range(9)], lambda: 1.0, send, stop, most=3)
    assert problem == "over-saturated: 3 requests were in flight at once"
    assert sent == [0, 1, 2] and stop.is_set()


def describe(before: Callable[[], None] | None = None) -> str:
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
    as_usual, first = describe(), describe(raise_priority)
    if allowed(REAL_TIME):
        assert first == "real time" != as_usual
    elif not allowed(RAISED):
        assert first == as_usual


def test_nice_values_are_lowered_if_real_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    as_usual, first = describe(), describe(raise_priority)
    if not allowed(RAISED):
        assert first == as_usual
        return
    assert first.startswith(f"nice {NICE}") and first != as_usual
    if "session" in first:  # a kernel that groups by session; every started process is in one
        assert first == f"nice {NICE}, session {NICE}"
        assert as_usual.endswith("session 0")


@pytest.mark.parametrize(
    ("group", "described"),
    [
        ("/autogroup-801 nice 3\n", ", session 3"),
        ("", ""),  # a process in no group
        (None, ""),  # a kernel without groups
    ],
)
def test_without_autogroups_only_the_nice_value_is_reported(
    group: str | None, described: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autogroup = tmp_path / "autogroup"
    if group is not None:
        autogroup.write_text(group)
    monkeypatch.setattr(module, "_SESSION", autogroup)
    assert describe_priority() == f"nice {os.getpriority(os.PRIO_PROCESS, 0)}{described}"


def test_other_processes_keep_their_priority() -> None:
    before = describe_priority()
    describe(raise_priority)
    assert describe_priority() == before == describe_priority()
    assert f"nice {os.getpriority(os.PRIO_PROCESS, 0)}" in before
