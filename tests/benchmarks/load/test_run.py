"""Complete runs through locust against the fake server: figures, several workers, early ends.

Each run is a process of its own, so there is one for each thing that cannot be seen otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import MODEL, Reply, fake_server
from benchmarks.load.experiment import run
from benchmarks.load.result import RECORDS, Result, read_journal
from benchmarks.load.settings import Load, RunOptions, Workload
from benchmarks.load.workload import prepare

WORKLOAD = Workload(model=MODEL, requests=40, warm_up=2, output_tokens=6, sides={48: 1})
REPLY = Reply(ttft=0.08, gaps=(0.02, 0.04))
LOAD = Load(rate=20.0)
OF_A_BUSY_MACHINE = "the client was the bottleneck"
"""The only reason against a run that a busy machine may cause."""


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    prepare(WORKLOAD, folder)
    return folder


def options(url: str, workload: Path, out: Path, load: Load = LOAD, workers: int = 0) -> RunOptions:
    return RunOptions(
        url=url,
        workload=workload,
        out=out,
        label="test",
        rate=load.rate or 0.0,
        users=load.users,
        patience=20,
        most=64,
        workers=workers,
    )


@pytest.fixture(scope="module")
def opened(
    workload: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Result, Path]]:
    """An open loop of one process."""
    out = tmp_path_factory.mktemp("open")
    with fake_server(REPLY) as server:
        yield run(options(server.url, workload, out)), out


def test_an_open_loop_sends_everything_by_its_schedule(opened: tuple[Result, Path]) -> None:
    result, out = opened
    records = read_journal(out / RECORDS)
    assert [record.index for record in records] == list(range(40))
    assert [record.scheduled for record in records] == pytest.approx(LOAD.due(40))
    assert all(record.started >= record.scheduled for record in records)
    assert result.summary.requests == 38 and result.summary.failed == 0  # without the ramp
    assert result.load == LOAD and result.workload == WORKLOAD
    assert result.metrics.peak_kv_use == 0.25
    assert result.server == {"server version": "mock"}
    assert all(reason.startswith(OF_A_BUSY_MACHINE) for reason in result.verdict.reasons)


def test_gaps_recorded_through_locust_are_right_within_3_ms(opened: tuple[Result, Path]) -> None:
    wanted = REPLY.times(6)
    gaps = [b - a for a, b in pairwise(wanted)]
    errors = [
        median(abs(measured - gap) for measured, gap in zip(record.gaps, gaps, strict=True))
        for record in read_journal(opened[1] / RECORDS)
    ]
    # In the quietest quarter of the answers: a busy machine delays some, a wrong clock all.
    assert len(errors) == 40 and sorted(errors)[10] < 0.003


def test_two_workers_share_the_schedule_of_one(workload: Path, tmp_path: Path) -> None:
    with fake_server(REPLY) as server:
        result = run(options(server.url, workload, tmp_path, workers=2))
        seen = len(server.requests)
    records = read_journal(tmp_path / RECORDS)
    assert seen == 40 + 2 * 2  # each worker warms up for itself
    assert [record.scheduled for record in records] == pytest.approx(LOAD.due(40))
    assert {(record.index % 2, record.worker) for record in records} == {(0, 0), (1, 1)}
    assert len(result.facts.clients) == 2
    assert all(reason.startswith(OF_A_BUSY_MACHINE) for reason in result.verdict.reasons)


def test_a_server_that_dies_ends_the_run_and_keeps_its_records(
    workload: Path, tmp_path: Path
) -> None:
    with fake_server(Reply(ttft=0.02, gaps=(0.005,)), serves=14) as server:
        result = run(options(server.url, workload, tmp_path, Load(users=2)))
    assert not result.verdict.valid
    assert "10 requests in a row failed" in result.verdict.describe()
    records = read_journal(tmp_path / RECORDS)
    # Two of the 14 are the warm-up, and the other user may have one in flight at the end.
    assert sum(record.ok for record in records) in (11, 12)
    assert f"only {len(records)} of 40 requests were recorded" in result.verdict.reasons


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_invalidates_the_run(workload: Path, tmp_path: Path) -> None:
    (tmp_path / RECORDS).symlink_to("/dev/full")
    with fake_server(Reply(ttft=0.01, gaps=(0.002,))) as server:
        result = run(options(server.url, workload, tmp_path, Load(users=8)))
    assert result.summary.requests == 24  # judged from memory
    assert any("No space left on device" in reason for reason in result.verdict.reasons)


def test_a_wrong_model_name_is_reported_with_the_served_ones(
    workload: Path, tmp_path: Path
) -> None:
    with (
        fake_server(model="llava") as server,
        pytest.raises(BenchmarkError, match="does not serve 'mock', only llava"),
    ):
        run(options(server.url, workload, tmp_path))
