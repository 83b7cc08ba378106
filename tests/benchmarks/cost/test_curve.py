"""Load curves: `vllm bench serve` against a server whose schedule is known, in this process."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import busy as busy_module
from benchmarks.common.busy import BusyWatch
from benchmarks.cost import curve
from benchmarks.cost.__main__ import main
from tests.fake_server import Body, FakeServer, Reply, fake_server


@contextlib.contextmanager
def serve(*flags: object, log: Path, **_: object) -> Iterator[FakeServer]:
    """Servers that answer stock after 0.1 s and all other arms after 0.02 s."""
    log.write_text("")

    def reply(body: Body) -> Reply:
        arm = body["mm_processor_kwargs"]["autoprune"]
        return Reply(ttft=0.1 if arm.get("enabled") is False else 0.02, gaps=(0.005,))

    with fake_server(reply, model="served") as server:
        extra: Any = server
        extra.process = SimpleNamespace(pid=os.getpid())
        extra.await_api_servers = lambda count: None
        extra.log = log
        yield server
        SENT.extend(server.requests)


SENT: list[Body] = []


def test_a_curve_has_a_row_for_every_point_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "serve", serve)
    SENT.clear()
    command = ["curve", "--users", "1,4", "--requests", "4", "--api-servers", "1"]
    command += ["--out", str(tmp_path)]
    assert main([*command, "--arms", "stock"]) == 0
    assert main(command) == 0
    text = capsys.readouterr().out
    table = text.rpartition("| API servers")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:10]]
    arms = [*curve.ARMS] * 2
    assert [(row[1], row[2]) for row in rows] == list(
        zip("11114444", arms, strict=True)
    )
    by_point = {(row[1], row[2]): row for row in rows}
    # A request takes 0.1 s and fifteen gaps, so that a user sends at most so many a second.
    assert 0.5 < float(by_point["1", "stock"][3]) <= 1 / 0.175
    assert all(row[10] == f"0 of {4 if row[1] == '1' else 8}" for row in rows)
    # A request that warms up stands before those that count.
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert len(points) == 8, "the points of the first run were not measured again"
    assert len(SENT) == sum(point["requests"] + 1 for point in points)
    asked = [body["mm_processor_kwargs"]["autoprune"] for body in SENT]
    assert {asked.count(fields) for fields in curve.ARMS.values()} == {4 + 1 + 8 + 1}
    images = {json.dumps(body["messages"]) for body in SENT}
    assert len(images) == 8, "as many pictures as the largest point has requests"


def test_busy_shares_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the server: it sleeps, then it works."""
    server: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))

    def watch_work() -> BusyWatch:
        watch = BusyWatch(server)
        time.sleep(2)
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        return watch

    begin = time.monotonic()
    busy = watch_work().read(1000)
    elapsed = time.monotonic() - begin
    assert busy.client == pytest.approx(0.5 / elapsed, rel=0.5)
    assert busy.api_servers == pytest.approx([busy.client], rel=0.5)
    assert watch_work().read(0.3).client > 1.2 * busy.client, "without the sleep"
    monkeypatch.setattr(BusyWatch, "_find_title", lambda *_: "VLLM::APIServer_0")
    watch = BusyWatch(server)
    assert len(watch.read(1).api_servers) == len(watch._processes)


def test_the_gpu_is_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter((0.2, 0.4, 0.6))
    monkeypatch.setattr(busy_module, "_open_gpu", lambda: lambda: next(shares, 0.6))
    server: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    watch = BusyWatch(server)
    time.sleep(0.5)
    gpu = watch.read(1000).gpu
    assert gpu is not None and 0.4 <= gpu <= 0.6
