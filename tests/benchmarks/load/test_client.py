"""The load client: its schedule, how it paces requests, its priority."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import gevent
import numpy as np
import pytest
from gevent.event import Event

from benchmarks.load.client import describe_priority, open_loop, raise_priority
from benchmarks.load.settings import Load


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_are_gamma_distributed(burstiness: float, variation: float) -> None:
    gaps = np.diff(Load(rate=5.0, burstiness=burstiness).due(20_000))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_the_seed_fixes_the_pattern_at_every_rate() -> None:
    slow, fast = Load(rate=1.0, seed=3).due(50), Load(rate=4.0, seed=3).due(50)
    assert np.allclose(slow, 4 * np.array(fast))
    assert not np.allclose(slow, Load(rate=1.0, seed=4).due(50))


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


def test_ramp_and_drain_do_not_count() -> None:
    closed = Load(users=3)
    assert closed.phases(20) == ["ramp"] * 3 + ["measured"] * 14 + ["drain"] * 3
    assert closed.due(3) == [0.0, 0.0, 0.0]
    assert Load(rate=2.0).phases(40) == ["ramp"] * 2 + ["measured"] * 38
    # Where nothing would remain, everything counts.
    assert Load(users=16).phases(20) == ["measured"] * 20


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


def test_real_time_scheduling_is_used_where_it_is_allowed() -> None:
    def python(code: str, before: Callable[[], None] | None = None) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=before
        ).stdout.strip()

    tell = "from benchmarks.load.client import describe_priority; print(describe_priority())"
    attempt = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); print(1)"
    before = describe_priority()
    raised = python(tell, raise_priority)
    assert raised == ("real time" if python(attempt) else python(tell))
    assert describe_priority() == before  # other processes keep theirs
