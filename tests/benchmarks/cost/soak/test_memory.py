from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from benchmarks.cost.soak.memory import SLACK, Flatness, Samples, watch_memory
from benchmarks.server import resident_by_process

MIB = 1 << 20


def samples(resident: Callable[[int], int], process: str = "7 worker", count: int = 100) -> Samples:
    recorded = Samples()
    for i in range(count):
        recorded.add(float(i), {process: resident(i)})
    return recorded


def judged(recorded: Samples, process: str = "7 worker") -> Flatness:
    (verdict,) = (one for one in recorded.judge() if one.process == process)
    return verdict


@pytest.mark.parametrize(
    ("resident", "flat"),
    [
        (lambda i: 1000 * MIB, True),
        (lambda i: (1000 if i >= 20 else 200) * MIB, True),  # warm-up
        (lambda i: (3000 if i == 50 else 1000) * MIB, True),  # a spike
        (lambda i: (1000 + 19 * (i >= 60)) * MIB, True),
        (lambda i: (1000 + 21 * (i >= 60)) * MIB, False),
        (lambda i: 1000 * MIB + i * MIB, False),  # a leak
        (lambda i: (1000 if i < 60 else 500) * MIB, True),  # it shrank
        (lambda i: 10 * MIB + i * SLACK // 100, True),  # more than 2 %, and next to nothing
        (lambda i: 10 * MIB + 2 * i * SLACK // 100, False),
    ],
    ids=[
        "constant",
        "growth in the warm-up",
        "spike",
        "1.9 %",
        "2.1 %",
        "leak",
        "shrinking",
        "less than the slack",
        "more than the slack",
    ],
)
def test_growth_beyond_the_tolerance_is_not_flat(
    resident: Callable[[int], int], flat: bool
) -> None:
    recorded = samples(resident)
    assert judged(recorded).flat is judged(recorded, "all").flat is flat


def test_a_process_that_starts_or_ends_is_not_flat() -> None:
    recorded = samples(lambda i: MIB)
    for sample in recorded.resident[70:]:
        assert isinstance(sample, dict)
        sample.clear()
        sample["8 worker"] = MIB
    assert not judged(recorded).flat
    assert not judged(recorded, "8 worker").flat
    assert judged(recorded).why == "it did not exist all the time"


def test_processes_that_end_in_the_warm_up_are_ignored() -> None:
    recorded = samples(lambda i: MIB)
    for sample in recorded.resident[:10]:
        assert isinstance(sample, dict)
        sample["6 starter"] = MIB
    assert {one.process for one in recorded.judge()} == {"7 worker", "all"}
    assert all(one.flat for one in recorded.judge())


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_samples_are_not_flat(count: int) -> None:
    (verdict,) = samples(lambda i: MIB, count=count).judge()
    assert not verdict.flat and "too few" in verdict.why


def test_memory_of_a_process_and_its_children_is_sampled() -> None:
    code = "import time; held = bytearray(50_000_000); print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        with watch_memory(os.getpid(), 0.01) as recorded:
            deadline = time.monotonic() + 60
            while len(recorded.resident) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
        child.kill()
        child.wait()
    (resident,) = (
        n for name, n in recorded.resident[-1].items() if name.startswith(f"{child.pid} ")
    )
    assert resident > 50_000_000
    assert recorded.seconds == sorted(set(recorded.seconds)) and len(recorded.seconds) >= 3
    assert any(name.startswith(f"{os.getpid()} ") for name in resident_by_process(os.getpid()))


def test_pages_of_files_are_left_out_where_asked() -> None:
    whole, own = (
        {name.split()[0]: size for name, size in sizes.items()}[str(os.getpid())]
        for sizes in (
            resident_by_process(os.getpid()),
            resident_by_process(os.getpid(), files=False),
        )
    )
    # Python and torch are files that this process has loaded.
    assert 0 < own < whole - 10 * MIB
