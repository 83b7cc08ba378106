"""Complete runs through locust against the fake server, and the experiment that they are part of.

Each run is a process of its own, so there is one for each thing that cannot be seen otherwise; in
the tests of the experiment, runs are made up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from benchmarks import BenchmarkError
from benchmarks.common.client import Record
from benchmarks.common.fake_server import MODEL, Reply, fake_server
from benchmarks.load import paired as module
from benchmarks.load.compare import Run
from benchmarks.load.paired import (
    STEPS,
    Arm,
    Paired,
    measure,
    raise_priority,
    read_paired,
    run,
)
from benchmarks.load.result import RECORDS, RESULT, Result, read_result
from benchmarks.load.settings import Load, PairedOptions, RunOptions, Workload
from benchmarks.load.workload import load_prepared, prepare
from tests.benchmarks.load.samples import record, result, write_images, write_run

WORKLOAD = Workload(model=MODEL, requests=40, warm_up=2, output_tokens=6, sides={48: 1})
REPLY = Reply(ttft=0.08, gaps=(0.02, 0.04))
LOAD = Load(rate=20.0)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    prepare(WORKLOAD, folder)
    return folder


def send(
    url: str, workload: Path, out: Path, load: Load = LOAD, *, workers: int = 0, most: int = 64
) -> tuple[Result, list[Record]]:
    rate, users = load.rate or 0.0, load.users
    options = RunOptions(host=url, workload=workload, out=out, rate=rate, users=users, most=most)
    run(options, workers)
    return read_result(out)


def only_of_a_busy_machine(result: Result) -> bool:
    """Whether the only reasons against a run are those that a busy machine may cause."""
    return all(reason.startswith("the client was the bottleneck") for reason in result.reasons)


def test_an_open_loop_sends_everything_by_its_schedule(workload: Path, tmp_path: Path) -> None:
    def count() -> str:
        engines = (len(server.requests), 7)
        name = 'vllm:request_success_total{engine="%d"} %d\n'
        return "".join(name % pair for pair in enumerate(engines))

    with fake_server(REPLY, pages={"/metrics": count}) as server:
        result, records = send(server.url, workload, tmp_path)
    assert len(server.requests) == 40 + 2  # the server is warmed up once
    assert [record.index for record in records] == list(range(40))
    assert [record.scheduled for record in records] == pytest.approx(LOAD.due(40))
    # Coordinated omission: requests behind an answer, here of 0.22 s, go out when due all the same.
    assert all(record.started >= record.scheduled for record in records)
    assert median(record.delay for record in records) < 0.5
    assert result.summary.requests == 38 and result.summary.failed == 0  # without the ramp
    assert result.load == LOAD and result.workload == WORKLOAD
    assert result.counters == {"finished": 40}
    assert only_of_a_busy_machine(result)
    # Gaps are right within 3 ms in the quietest quarter of the answers: a busy machine delays
    # some, a wrong clock all.
    gaps = [b - a for a, b in pairwise(REPLY.times(6))]
    errors = [
        median(abs(measured - gap) for measured, gap in zip(record.gaps, gaps, strict=True))
        for record in records
    ]
    assert len(errors) == 40 and sorted(errors)[10] < 0.003


def test_two_workers_share_the_schedule_of_one(workload: Path, tmp_path: Path) -> None:
    with fake_server(REPLY) as server:
        result, records = send(server.url, workload, tmp_path, workers=2)
    assert [record.scheduled for record in records] == pytest.approx(LOAD.due(40))
    assert {(record.index % 2, record.worker) for record in records} == {(0, 0), (1, 1)}
    assert len(result.clients) == 2 and only_of_a_busy_machine(result)


def test_a_server_that_dies_ends_the_run_and_keeps_its_records(
    workload: Path, tmp_path: Path
) -> None:
    with fake_server(Reply(ttft=0.02, gaps=(0.005,)), serves=14) as server:
        result, records = send(server.url, workload, tmp_path, Load(users=2))
    assert "10 requests in a row failed" in result.verdict
    # Two of the 14 are the warm-up, and the other user may have one in flight at the end.
    assert sum(record.ok for record in records) in (11, 12)
    assert f"only {len(records)} of 40 requests were recorded" in result.reasons


def test_too_many_requests_in_flight_end_the_run(workload: Path, tmp_path: Path) -> None:
    with fake_server(Reply(ttft=0.5)) as server:
        result, records = send(server.url, workload, tmp_path, most=3)
    assert result.reasons[0] == "over-saturated: 3 requests were in flight at once"
    assert f"only {len(records)} of 40 requests were recorded" in result.reasons


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_invalidates_the_run(workload: Path, tmp_path: Path) -> None:
    (tmp_path / RECORDS).symlink_to("/dev/full")
    with fake_server(Reply(ttft=0.01, gaps=(0.002,))) as server:
        run(RunOptions(host=server.url, workload=workload, out=tmp_path, users=8))
    result = Result.model_validate_json((tmp_path / RESULT).read_text())
    assert result.summary.requests == 24  # judged from memory
    assert any("No space left on device" in reason for reason in result.reasons)


@pytest.mark.skipif(sys.platform != "linux", reason="real-time scheduling is Linux's")
def test_real_time_scheduling_is_used_where_it_is_allowed() -> None:
    def python(code: str, before: Callable[[], None] | None = None) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=before
        ).stdout.strip()

    tell = "import os; print(os.sched_getscheduler(0))"
    attempt = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); "
    assert python(tell, raise_priority) == (python(attempt + tell) or python(tell))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Options of all runs; servers sustain 2 requests/s, and those named dead do not answer."""
    requested: list[RunOptions] = []

    def run(options: RunOptions, workers: int) -> None:
        requested.append(options)
        if "dead" in options.host:
            raise BenchmarkError(f"server {options.host}: /v1/models is not answered")
        rate = options.load.rate or 2.0
        late = 0.1 if rate <= 2.0 else 0.9
        records = [record(n, scheduled=n / rate, ttft=late) for n in range(20)]
        write_run(Run("", 0, "", result(records, options.load), records), options.out)

    monkeypatch.setattr(module, "run", run)
    return requested


def measured(out: Path, *arms: str, **options: object) -> Paired:
    """The experiment on small requests; an arm's name is its server's."""
    small = {"requests": 8, "warm_up": 2, "output_tokens": 4, "sides": "64", "slo_ttft": 500}
    served = [Arm(name=name, url=f"http://{name}") for name in arms or "ab"]
    return measure(PairedOptions.model_validate({**small, "out": out, **options}), served)


def test_arms_alternate_and_loads_share_no_images(seen: list[RunOptions], tmp_path: Path) -> None:
    experiment = measured(tmp_path, users="1,2", rates="1")
    order = [(options.host[-1], options.load.label) for options in seen]
    loads = ["users-1", "users-2", "rate-1"]
    assert order == [(arm, label) for arm in "abba" for label in loads]
    digests = {options.load.label: load_prepared(options.workload).digest for options in seen}
    assert len(set(digests.values())) == 3
    assert len({options.out for options in seen}) == 12
    assert [arm for arm, _, _ in experiment.runs] == [arm for arm in "abba" for _ in loads]
    assert read_paired(tmp_path)[0] == experiment and experiment.broken is None


def test_loads_share_no_image_of_ones_own_data(seen: list[RunOptions], tmp_path: Path) -> None:
    write_images(tmp_path / "data", 30)
    measured(tmp_path / "out", users="1,2", rates="1", data=str(tmp_path / "data"))
    loads = {options.load.label: load_prepared(options.workload) for options in seen}
    bodies = {label: (*load.measured, *load.warm_up) for label, load in loads.items()}
    urls = {body.partition(b'"url": "')[2][:200] for load in bodies.values() for body in load}
    assert [len(load) for load in bodies.values()] == [10, 10, 10]
    assert len(urls) == 30


def test_rates_are_chosen_once_and_raised_until_saturation(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    experiment = measured(tmp_path, rates="find", passes=1)
    assert seen[0].load.users == 16  # the capacity is measured first
    capacity = read_paired(tmp_path)[1][0].result.summary.request_rate
    assert experiment.rates == pytest.approx([step * capacity for step in STEPS], rel=0.01)
    for arm in "ab":
        rates = [opts.load.rate for opts in seen if opts.host[-1] == arm and opts.load.rate]
        # At the first rate above 2 all requests miss the objective, and no higher one is tried.
        assert rates == list(experiment.rates[: len(rates)])
        assert rates[-1] > 2.0 and all(rate <= 2.0 for rate in rates[:-1])


def test_runs_before_a_failure_are_kept(seen: list[RunOptions], tmp_path: Path) -> None:
    experiment = measured(tmp_path, "a", "dead", users="1")
    assert experiment.broken == "server http://dead: /v1/models is not answered"
    assert [arm for arm, _, _ in experiment.runs] == ["a"]
    assert read_paired(tmp_path)[0].broken == experiment.broken
