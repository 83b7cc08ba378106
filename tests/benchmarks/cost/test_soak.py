"""A soak of a fake server: equal counts on both sides, and every fault and leak detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.common.fake_server import Reply, fake_server
from benchmarks.cost import soak as command
from benchmarks.cost.__main__ import main
from benchmarks.cost.soak import (
    SLACK,
    Samples,
    Tally,
    build_report,
    compare_counts,
    connect,
    format_report,
    keep_busy,
    read_counters,
    send,
    watch_memory,
)
from benchmarks.cost.soak_requests import KINDS, LONG_ANSWER, RequestMix
from tests.benchmarks.cost.planned_server import (
    BUDGET,
    KV_BYTES,
    RECALL,
    START,
    TOKENS,
    Faults,
    serve_planned,
)

MIB = 1 << 20
MIX = RequestMix("model", TOKENS, "autoprune", BUDGET, RECALL, KV_BYTES, START, ("first", "second"))


def metrics(url: str) -> dict[str, float]:
    return read_counters(httpx.get(f"{url}/metrics").text)


def samples(resident: Callable[[int], int], process: str = "7 worker", count: int = 100) -> Samples:
    return Samples(list(map(float, range(count))), [{process: resident(i)} for i in range(count)])


def soak(url: str, seconds: float = 1.5) -> dict[str, Any]:
    before = metrics(url)
    tally = keep_busy(url, MIX, users=4, seconds=seconds)
    pairs = compare_counts(before, metrics(url), tally)
    return build_report(seconds / 60, 4, 0, tally, pairs, samples(lambda i: MIB))


def test_client_and_server_counts_are_equal() -> None:
    with serve_planned() as url:
        reports = soak(url), soak(url)  # the second time, metrics do not begin at zero
    for report in reports:
        assert report["wrong"] == [] and report["holds"]
        assert report["client"]["answered"] > 0
        assert "The soak is passed." in format_report(report)
    labels = {name.split()[-1] for name in reports[0]["client"]["counts"]}
    assert {"autoprune", "off", "request"} & labels


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(failed=3), "requests failed"),
        (Faults(broken=3), "requests failed"),
        (Faults(forgotten=3), "vllm:prompt_tokens_total: "),
        (Faults(fallen=3), "autoprune_fallbacks_total: "),
    ],
    ids=["failed", "broken", "forgotten", "fallen"],
)
def test_every_fault_is_a_problem(faults: Faults, message: str) -> None:
    with serve_planned(faults) as url:
        report = soak(url, 2.5 if faults.broken else 1.5)
    assert any(message in problem for problem in report["wrong"])
    assert "The soak is not passed." in format_report(report)
    assert json.loads(json.dumps(report))["holds"] is False


def test_a_server_that_is_down_is_a_problem() -> None:
    with serve_planned() as url:
        pass
    tally = keep_busy(url, MIX, users=2, seconds=0.2)
    assert tally.errors == tally.sent == 3  # of both users, and of the client that hangs up
    report = build_report(1, 2, 0, tally, [], samples(lambda i: MIB))
    assert "nothing was answered" in report["wrong"]


def test_every_kind_of_request_has_the_planned_status_and_tokens() -> None:
    """The fake server plans with the plugin's own code: status and tokens of many draws."""
    random, kinds, models, bodies = Random(3), set(), set(), set()
    with serve_planned() as url, connect(url) as client:
        for _ in range(150):
            request, tally = MIX.draw(random), Tally()
            bodies.add(request.body)
            models.add(json.loads(request.body)["model"])
            assert send(client, request, tally)
            assert tally.faults == []
            if request.status == 200:
                after = tally.counts["autoprune_visual_tokens_total after"]
                assert tally.counts["vllm:prompt_tokens_total"] == 20 + after
            kinds.add(request.kind)
    assert kinds == set(KINDS) and models == {"first", "second", "model"}
    assert len(bodies) > 100, "pictures vary"


def test_counts_of_the_server_alone_are_compared_with_zero() -> None:
    pairs = compare_counts({}, {"autoprune_requests_total mine": 2.0}, Tally())
    (pair,) = (pair for pair in pairs if pair["what"] == "autoprune_requests_total mine")
    assert (pair["client"], pair["server"], pair["equal"]) == (0.0, 2.0, False)


def test_counters_are_summed_over_engines() -> None:
    exposition = "".join(f'vllm:prompt_tokens_total{{engine="{i}"}} 3.0\n' for i in range(2))
    assert read_counters(exposition + "vllm:other_total 5.0\n") == {"vllm:prompt_tokens_total": 6.0}


def test_a_client_that_hangs_up_is_counted_by_what_it_has_read() -> None:
    request, tally = MIX.draw(Random(5), stream=True), Tally()
    with serve_planned() as url, connect(url) as client:
        send(client, request, tally, 4)
        pairs = compare_counts({}, metrics(url), tally)
    assert tally.errors == 0 and tally.killed == 1
    assert all(pair["equal"] for pair in pairs)
    (tokens,) = (pair for pair in pairs if pair["what"] == "vllm:generation_tokens_total")
    # The first event names the role.
    assert (tokens["client"], tokens["server"], tokens["unseen"]) == (
        3, LONG_ANSWER, LONG_ANSWER - 3,
    )  # fmt: skip


def test_a_stream_that_ends_or_is_refused_is_an_error() -> None:
    request, tally = MIX.draw(Random(5), stream=True), Tally()
    reply = Reply(deltas=("one",), ttft=0.0)
    with fake_server(reply, model=None) as server, connect(server.url) as client:
        send(client, request, tally, 50)
    with fake_server(reply, model="another") as server, connect(server.url) as client:
        send(client, request, tally, 1)
    assert "ended before" in tally.faults[0] and "HTTP 404" in tally.faults[1]


def test_an_answer_that_ended_after_its_client_hung_up_is_told_apart_by_its_length() -> None:
    tally = Tally(answered=5, killed=2)
    ended, short = "vllm:request_success_total", "vllm:request_generation_tokens_bucket 5.0"

    def equal(ended_by_server: float, short_by_server: float) -> bool:
        after = {ended: ended_by_server, short: short_by_server}
        return all(pair["equal"] for pair in compare_counts({}, after, tally))

    assert equal(5, 5)
    assert equal(7, 5)
    assert not equal(8, 5)
    assert not equal(6, 6)
    assert not equal(5, 4)


def test_the_command_writes_json_and_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = samples(lambda i: MIB)
    for errors, status in ((0, 0), (1, 1)):
        tally = Tally(sent=1, answered=1 - errors, errors=errors)
        report = build_report(2.0, 4, 0, tally, [], flat)
        monkeypatch.setattr(command, "soak", lambda *asked, report=report: report)
        assert main(["soak", "--minutes", "2", "--out", str(tmp_path / "soak")]) == status
        written = json.loads((tmp_path / "soak" / "soak.json").read_text())
        assert written["holds"] is (status == 0)
        assert written["samples"]["resident"][0] == {"7 worker": MIB}
    assert "1 errors" in capsys.readouterr().out


def judged(recorded: Samples, process: str = "7 worker") -> dict[str, Any]:
    (verdict,) = (row for row in recorded.judge() if row["process"] == process)
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
    ids=["constant", "warm-up", "spike", "1.9 %", "2.1 %", "leak", "shrinking", "slack", "more"],
)
def test_growth_beyond_the_tolerance_is_not_flat(
    resident: Callable[[int], int], flat: bool
) -> None:
    recorded = samples(resident)
    assert judged(recorded)["flat"] is judged(recorded, "all")["flat"] is flat


def test_a_process_that_starts_or_ends_is_not_flat_after_the_warm_up() -> None:
    recorded = samples(lambda i: MIB)
    for sample in recorded.resident[:10]:
        sample["6 starter"] = MIB
    assert all(row["flat"] for row in recorded.judge()) and len(recorded.judge()) == 2
    for sample in recorded.resident[70:]:
        sample.clear()
        sample["8 worker"] = MIB
    assert not judged(recorded, "8 worker")["flat"]
    assert judged(recorded)["why"] == "it did not exist all the time"


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_samples_are_not_flat(count: int) -> None:
    (verdict,) = samples(lambda i: MIB, count=count).judge()
    assert not verdict["flat"] and "too few" in verdict["why"]


def test_memory_of_a_process_and_its_children_is_sampled_without_files() -> None:
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
    by_pid = {name.split()[0]: size for name, size in recorded.resident[-1].items()}
    # Python's own files are shared, so that little more than the array is left.
    assert 50_000_000 < by_pid[str(child.pid)] < 65_000_000 and str(os.getpid()) in by_pid
    assert recorded.seconds == sorted(set(recorded.seconds)) and len(recorded.seconds) >= 3
