"""A soak of a fake server: equal counts on both sides, and every fault and leak detected."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.cost import soak
from tests.fake_server import Answer, Body, Reply, fake_server
from tests.tables import parametrize_from_file

MIB = 1 << 20


@parametrize_from_file("fault", "problem")
def test_a_soak_is_passed_but_for_a_fault(
    fault: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts what the client expects, but for its tenth request."""
    counts = Counter[str]()
    wanted = dict[str, soak._Request]()
    requests = list[Body]()
    draw = soak._Request.draw
    lock = threading.Lock()
    draw(Random(0), 5)  # draws the repeated pictures

    def draw_numbered(*values: Any, **options: Any) -> soak._Request:
        request = draw(*values, **options)
        with lock:
            number = f"n{len(wanted)}"
            body = request.body.replace(
                b'"temperature": 0', f'"user": "{number}"'.encode()
            )
            wanted[number] = request._replace(body=body)
        return wanted[number]

    def reply(body: Body) -> Reply | Answer:
        request = wanted[body["user"]]
        with lock:
            requests.append(body)
            due = fault if len(requests) == 10 else ""
            counts.update({} if due in ("failed", "forgotten") else request.counts)
            counts["autoprune_fallbacks_total"] += due == "fallen"
            counts["autoprune_requests_total mine"] += due == "another's"
        if due == "failed":
            return Reply(status=500)
        return Reply(
            ttft=0.01, gaps=(0.001,), status=400 if request.kind == "bad" else 200
        )

    def metrics() -> str:
        named = [name.partition(" ") for name in counts]
        return "".join(
            f'{name}{{engine="0",{"le" if "bucket" in name else "state"}="{label}"}} '
            f"{counts[f'{name}{space}{label}']}\n"
            for name, space, label in named
        )

    monkeypatch.setattr(soak, "_KINDS", soak._KINDS | {"bad": 0 if fault else 5})
    monkeypatch.setattr(soak._Request, "draw", staticmethod(draw_numbered))
    with fake_server(reply, model=None, pages={"/metrics": metrics}) as server:
        tally, samples = soak._keep_busy(
            server.url, os.getpid(), 5, users=4, seconds=2.5
        )
        gained = soak._read_counters(httpx.get(f"{server.url}/metrics").text)
    assert len(requests) > 10 and any(str(os.getpid()) in name for name in samples[-1])
    text, passed = tally.format_report(0.025, tally.compare(gained), [{}] * 9)
    assert passed is not bool(fault) and problem in text


@pytest.mark.parametrize(
    ("resident", "problem"),
    [
        (lambda i: (1000 if i >= 20 else 200) * MIB, ""),  # warm-up
        (lambda i: (3000 if i == 50 else 1000) * MIB, ""),  # a spike
        (lambda i: (1000 + 19 * (i >= 60)) * MIB, ""),
        (lambda i: (1000 + 21 * (i >= 60)) * MIB, "memory of 7 worker: it grew"),
        (
            lambda i: 10 * MIB + i * soak._SLACK // 100,
            "",
        ),  # more than 2 %, and next to nothing
        (
            lambda i: None if i < 30 else MIB,
            "memory of 7 worker: it did not exist all the time",
        ),
        (
            lambda i: None if i >= 90 else MIB,
            "memory of 7 worker: it did not exist all the time",
        ),
    ],
    ids=["warm-up", "spike", "1.9 %", "2.1 %", "slack", "started", "ended"],
)
def test_growth_beyond_the_tolerance_is_a_problem(
    resident: Callable[[int], int | None], problem: str
) -> None:
    sizes = map(resident, range(100))
    samples = [{} if size is None else {"7 worker": size} for size in sizes]
    text, passed = soak._Tally(Counter(answered=1)).format_report(1.0, (), samples)
    assert passed is not bool(problem) and problem in text
