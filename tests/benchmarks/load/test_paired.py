"""Options; complete runs through locust against the fake server; the experiment they are part of.

Each run is a process of its own, so there is one for each thing that cannot be seen otherwise; in
the tests of the experiment, runs are made up.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from benchmarks import BenchmarkError
from benchmarks.common.client import Record
from benchmarks.cost.__main__ import parse_arguments as parse_cost_arguments
from benchmarks.load import paired as module
from benchmarks.load.__main__ import main, parse_arguments
from benchmarks.load.paired import Arm, measure
from benchmarks.load.report import REPORT
from benchmarks.load.result import RECORDS, Result
from benchmarks.load.settings import Load, PairedOptions, RunOptions, Workload
from benchmarks.load.workload import Prepared, prepare
from tests.benchmarks.load.samples import record, result
from tests.fake_server import MODEL, Body, FakeServer, Reply, fake_server
from vllm_autoprune import load_state

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"

MISTAKES = {
    "--sides 32=0": "--sides: '0' is refused -> give a value that is greater than 0",
    "--users a": "--users: 'a' is refused",
    "--passes 0 --pool 0": "--pool: '0' is refused",
    "--sidez 336": "unrecognized arguments: --sidez 336",
    '--server-flags "\'"': "--server-flags: No closing quotation -> close the quotation",
    "--model out/none/such": "--model out/none/such: no such folder -> name a checkpoint",
    "--model shape:x": "--model shape:x: 'x' is not a whole number",
    "--model shape:٣": "--model shape:٣: '٣' is not a whole number",
    "--attach a": "--attach: 'a' is no server -> give NAME=http://HOST:PORT",
    "--attach a=http://x a=http://y": "two servers have the same name",
    "": "nothing to measure -> give --users or --rates",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
) -> None:
    monkeypatch.setattr(Arm, "serve", None)  # cannot be called
    users = [] if not flags or "--users" in flags else ["--users", "1"]
    try:
        status: object = main(
            ["paired", *users, "--out", str(tmp_path / "o"), *shlex.split(flags)]
        )
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status in (1, 2) and not (tmp_path / "o").exists()
    assert MISTAKES[flags] in error and error.count("\n") == 1


def test_the_three_arms_differ_only_in_their_state() -> None:
    stock, base, pruned = Arm.choose(
        PairedOptions(state="autoprune", budget="1/9", cache="off")
    )
    assert [arm.name for arm in (stock, base, pruned)] == [
        "stock",
        "base policy",
        "AutoPrune",
    ]
    assert (
        base.flags[: len(stock.flags)]
        == pruned.flags[: len(stock.flags)]
        == stock.flags
    )
    extra = base.flags[len(stock.flags) :]
    assert extra[:4] == ("--autoprune-state", "cdpruner", "--autoprune-budget", "1/9")
    assert pruned.flags[len(stock.flags) :] == (
        "--autoprune-state",
        "autoprune",
        *extra[2:],
    )
    assert (stock.digest, pruned.digest) == (None, load_state("autoprune").digest)
    arms = Arm.choose(PairedOptions(state="cen_divprune"))  # its own base policy
    assert [arm.name for arm in arms] == ["stock", "AutoPrune"]
    # Every cache of every arm is off.
    assert {"--no-enable-prefix-caching", "--mm-processor-cache-gb"} < set(stock.flags)
    assert extra[extra.index("--autoprune-feature-cache-gb") + 1] == "0"


def documented() -> list[str]:
    """Commands in the page's blocks of shell, without their continuation lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line for line in lines if re.match(r"python -m benchmarks\.(load|cost) ", line)
    ]


@pytest.mark.parametrize("command", documented())
def test_documented_commands_parse(command: str) -> None:
    arguments = shlex.split(command)[3:]
    if "benchmarks.cost" in command:
        parse_cost_arguments(arguments)
        return
    options = parse_arguments(arguments)
    if "--rates find" in command:
        assert isinstance(options, PairedOptions) and options.rates == "find"
    if "--attach" in command:
        assert isinstance(options, PairedOptions)
        assert (options.users, options.rates) == ((1, 4, 16, 64), (2, 4, 8, 16))
        assert options.sides == {640: 2, 1024: 1} and options.images == {1: 3, 2: 1}
        stock, pruned = Arm.choose(options)
        assert (stock.name, pruned.url) == ("stock", "http://gpu-2:8000")


# ---- runs through locust ----

WORKLOAD = Workload(model=MODEL, requests=40, warm_up=2, output_tokens=6, sides={48: 1})
REPLY = Reply(ttft=0.08, gaps=(0.02, 0.04))
LOAD = Load(rate=20.0)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    prepare(WORKLOAD, folder)
    return folder


def send(
    url: str, workload: Path, out: Path, load: Load = LOAD, **more: object
) -> tuple[Result, list[Record]]:
    places = {"host": url, "workload": workload, "out": out}
    sending = {"rate": load.rate or 0.0, "users": load.users, "most": 64, **more}
    return module._run(RunOptions.model_validate({**places, **sending}))


class OpenLoop(NamedTuple):
    """A run in an open loop, with a key and a header."""

    server: FakeServer
    folder: Path
    result: Result
    records: list[Record]


@pytest.fixture(scope="module")
def open_loop(
    workload: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenLoop]:
    folder = tmp_path_factory.mktemp("open-loop")

    def count() -> str:
        engines = (len(server.requests), 7)
        name = 'vllm:request_success_total{engine="%d"} %d\n'
        return "".join(name % pair for pair in enumerate(engines))

    key: dict[str, Any] = {"api_key": "secret", "header": ["X-Team=blue"]}
    with fake_server(REPLY, pages={"/metrics": count}) as server:
        yield OpenLoop(server, folder, *send(server.url, workload, folder, **key))


def test_every_request_has_the_key_and_no_file_has_it(open_loop: OpenLoop) -> None:
    headers = open_loop.server.headers
    sent = {(header["Authorization"], header["X-Team"]) for header in headers}
    assert sent == {("Bearer secret", "blue")}, "the question for its metrics too"
    files = [path.read_text() for path in open_loop.folder.iterdir()]
    assert files and not any("secret" in text for text in files)


def test_an_open_loop_sends_everything_by_its_schedule(open_loop: OpenLoop) -> None:
    records = open_loop.records
    assert len(open_loop.server.requests) == 40 + 2  # the server is warmed up once
    assert [record.index for record in records] == list(range(40))
    assert [record.scheduled for record in records] == pytest.approx(LOAD.due(40))
    # Coordinated omission: requests behind an answer, here of 0.22 s, go out when due all the same.
    assert all(record.started >= record.scheduled for record in records)
    assert median(record.delay for record in records) < 0.5


def test_a_result_has_the_workload_the_load_and_what_the_server_counted(
    open_loop: OpenLoop,
) -> None:
    result = open_loop.result
    summary = result.summary
    assert (summary.requests, summary.failed) == (38, 0)  # without the ramp
    assert result.options.load == LOAD and result.workload == WORKLOAD
    assert result.counters == {"finished": 40}
    bottleneck = "the client was the bottleneck"  # of a busy machine
    assert all(reason.startswith(bottleneck) for reason in result.reasons)


def test_gaps_are_those_between_what_the_server_sent(open_loop: OpenLoop) -> None:
    """Within 3 ms in the quietest quarter of the answers: a busy machine delays some, a wrong clock
    all.
    """
    gaps = [b - a for a, b in pairwise(REPLY.times(6))]
    errors = [
        median(abs(a - b) for a, b in zip(record.gaps, gaps, strict=True))
        for record in open_loop.records
    ]
    assert len(errors) == 40 and sorted(errors)[10] < 0.003


def test_a_server_that_dies_ends_the_run_and_keeps_its_records(
    workload: Path, tmp_path: Path
) -> None:
    def die(body: Body) -> Reply:
        return Reply(ttft=0.02, gaps=(0.005,), drop=len(server.requests) > 14)

    with fake_server(die) as server:
        result, records = send(server.url, workload, tmp_path, Load(users=2))
    assert "10 requests in a row failed" in result.verdict
    # Two of the 14 are the warm-up, and the other user may have one in flight at the end.
    assert sum(record.ok for record in records) in (11, 12)
    assert f"only {len(records)} of 40 requests were recorded" in result.reasons


def test_too_many_requests_in_flight_end_the_run(
    workload: Path, tmp_path: Path
) -> None:
    with fake_server(Reply(ttft=0.5)) as server:
        result, records = send(server.url, workload, tmp_path, most=3)
    assert result.reasons[0] == "over-saturated: 3 requests were in flight at once"
    assert f"only {len(records)} of 40 requests were recorded" in result.reasons


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_leaves_no_result(workload: Path, tmp_path: Path) -> None:
    (tmp_path / RECORDS).symlink_to("/dev/full")
    lost = pytest.raises(
        BenchmarkError, match=r"locust ended with 1 .*No space left on device"
    )
    with fake_server(Reply(ttft=0.01, gaps=(0.002,))) as server, lost:
        send(server.url, workload, tmp_path, Load(users=8))


@pytest.mark.skipif(sys.platform != "linux", reason="real-time scheduling is Linux's")
def test_real_time_scheduling_is_used_where_it_is_allowed() -> None:
    def python(code: str, before: Callable[[], None] | None = None) -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            preexec_fn=before,
        ).stdout.strip()

    tell = "import os; print(os.sched_getscheduler(0))"
    attempt = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); "
    assert python(tell, module._raise_priority) == (
        python(attempt + tell) or python(tell)
    )


# ---- experiments ----


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Options of all runs; servers sustain 2 requests/s, and those named dead do not answer."""
    requested: list[RunOptions] = []

    def run(options: RunOptions) -> tuple[Result, list[Record]]:
        requested.append(options)
        if "dead" in options.host:
            raise BenchmarkError.of(
                f"server {options.host}", "/v1/models is not answered"
            )
        rate = options.load.rate or 2.0
        late = 0.1 if rate <= 2.0 else 0.9
        records = [record(n, scheduled=n / rate, ttft=late) for n in range(20)]
        return result(records, options.load), records

    monkeypatch.setattr(module, "_run", run)
    return requested


def measured(out: Path, *arms: str, **options: object) -> tuple[str, int, str]:
    """The experiment on small requests; an arm's name is its server's."""
    small = {
        "requests": 8,
        "warm_up": 2,
        "output_tokens": 4,
        "sides": "64",
        "slo_ttft": 500,
    }
    served = [Arm(name=name, url=f"http://{name}") for name in arms or "ab"]
    return measure(
        PairedOptions.model_validate({**small, "out": out, **options}), served
    )


def test_arms_alternate_and_loads_share_no_images(
    seen: list[RunOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, invalid, broken = measured(tmp_path, users="1,2", rates="1")
    assert (invalid, broken) == (0, "")
    order = [(options.host[-1], options.load.label) for options in seen]
    loads = ["users-1", "users-2", "rate-1"]
    assert order == [(arm, label) for arm in "abba" for label in loads]
    prepared = {options.load.label: Prepared.read(options.workload) for options in seen}
    bodies = [
        body for load in prepared.values() for body in (*load.measured, *load.warm_up)
    ]
    urls = {re.findall(rb'"url": "([^"]+)"', body)[0] for body in bodies}
    assert len(bodies) == len(urls) == 30
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "run 1 of 12: a, 1 user"
    assert lines[1].startswith("  TTFT p50 100 ms, valid")


def test_rates_are_chosen_once_and_raised_until_saturation(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    measured(tmp_path, rates="find", passes=1)
    assert seen[0].load.users == 16  # the capacity is measured first
    first_rate = min(opts.load.rate for opts in seen if opts.load.rate)
    steps = [step / module._STEPS[0] * first_rate for step in module._STEPS]
    assert first_rate == pytest.approx(0.3 * 2.0, rel=0.05)
    for arm in "ab":
        rates = [
            opts.load.rate for opts in seen if opts.host[-1] == arm and opts.load.rate
        ]
        # At the first rate above 2 all requests miss the objective, and no higher one is tried.
        assert rates == pytest.approx(steps[: len(rates)], rel=0.01)
        assert rates[-1] > 2.0 and all(rate <= 2.0 for rate in rates[:-1])


def test_runs_have_the_key_and_the_headers_of_the_experiment(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    measured(tmp_path, users="1", api_key="secret", header=["X-Team=blue"])
    assert seen
    for options in seen:
        assert options.api_key is not None
        assert options.api_key.get_secret_value() == "secret"
        assert list(options.header) == ["X-Team=blue"]


def test_runs_before_a_failure_are_kept(seen: list[RunOptions], tmp_path: Path) -> None:
    answer, _, broken = measured(tmp_path, "a", "dead", users="1")
    assert broken == "server http://dead: /v1/models is not answered"
    assert "a answered" in answer and broken in (tmp_path / REPORT).read_text()
    with pytest.raises(BenchmarkError, match="/v1/models is not answered"):
        measured(tmp_path, "dead", users="1")
