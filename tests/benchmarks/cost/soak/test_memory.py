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


def samples(held: Callable[[int], int], process: str = "7 worker", looks: int = 100) -> Samples:
    seen = Samples()
    for i in range(looks):
        seen.add(float(i), {process: held(i)})
    return seen


def judged(seen: Samples, process: str = "7 worker") -> Flatness:
    (found,) = (one for one in seen.judge() if one.process == process)
    return found


@pytest.mark.parametrize(
    ("held", "flat"),
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
def test_growth_beyond_the_tolerance_is_not_flat(held: Callable[[int], int], flat: bool) -> None:
    seen = samples(held)
    assert judged(seen).flat is judged(seen, "all").flat is flat


def test_a_process_that_starts_or_ends_is_not_flat() -> None:
    seen = samples(lambda i: MIB)
    for look in seen.resident[70:]:
        assert isinstance(look, dict)
        look.clear()
        look["8 worker"] = MIB
    assert not judged(seen).flat
    assert not judged(seen, "8 worker").flat
    assert judged(seen).why == "it did not exist all the time"


def test_processes_that_end_in_the_warm_up_are_ignored() -> None:
    seen = samples(lambda i: MIB)
    for look in seen.resident[:10]:
        assert isinstance(look, dict)
        look["6 starter"] = MIB
    assert {one.process for one in seen.judge()} == {"7 worker", "all"}
    assert all(one.flat for one in seen.judge())


@pytest.mark.parametrize("looks", [0, 1, 4])
def test_too_few_samples_are_not_flat(looks: int) -> None:
    (told,) = samples(lambda i: MIB, looks=looks).judge()
    assert not told.flat and "too few" in told.why


def test_memory_of_a_process_and_its_children_is_sampled() -> None:
    code = "import time; held = bytearray(50_000_000); print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        with watch_memory(os.getpid(), 0.01) as looked:
            deadline = time.monotonic() + 60
            while len(looked.resident) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
        child.kill()
        child.wait()
    (held,) = (n for name, n in looked.resident[-1].items() if name.startswith(f"{child.pid} "))
    assert held > 50_000_000
    assert looked.seconds == sorted(set(looked.seconds)) and len(looked.seconds) >= 3
    assert any(name.startswith(f"{os.getpid()} ") for name in resident_by_process(os.getpid()))
