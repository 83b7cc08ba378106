"""A soak of a fake server: equal counts on both sides, and every fault detected."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from random import Random

import pytest

from benchmarks.common.client import Client
from benchmarks.common.fake_server import Reply, fake_server
from benchmarks.cost import soak as command
from benchmarks.cost.__main__ import main
from benchmarks.cost.soak import Verdict
from benchmarks.cost.soak.counts import (
    CountPair,
    Tally,
    compare_counts,
    keep_busy,
    read_counters,
)
from benchmarks.cost.soak.hang_up import hang_up
from benchmarks.cost.soak.memory import Samples
from benchmarks.cost.soak.requests import KINDS, LONG_ANSWER, RequestMix
from tests.benchmarks.cost.soak.fake_server import (
    BUDGET,
    KV_BYTES,
    RECALL,
    START,
    TOKENS,
    Faults,
    serve_planned,
)

USAGE = {"include_usage": True, "continuous_usage_stats": True}


def mix() -> RequestMix:
    return RequestMix("model", TOKENS, "autoprune", BUDGET, RECALL, START, ("first", "second"))


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return dict(read_counters(answer.read().decode()))


def soaked(url: str, seconds: float = 1.5) -> Verdict:
    before = metrics(url)
    tally = keep_busy(url, mix(), users=4, seconds=seconds)
    lines = compare_counts(before, metrics(url), tally, KV_BYTES)
    return Verdict(seconds / 60, 4, tally, lines, flat(), "a test")


def flat() -> Samples:
    samples = Samples()
    for second in range(50):
        samples.add(float(second), {"1 vllm": 1 << 30})
    return samples


def test_client_and_server_counts_are_equal() -> None:
    with serve_planned() as url:
        first = soaked(url)
        again = soaked(url)  # metrics do not begin at zero
    for verdict in (first, again):
        assert verdict.problems == []
        assert verdict.tally.answered > 4
        assert all(line.equal for line in verdict.counts)
        assert "The soak is passed." in verdict.format()
    assert {"autoprune", "off", "request"} & set(first.tally.requests)


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
        verdict = soaked(url, 2.5 if faults.broken else 1.5)
    assert any(message in problem for problem in verdict.problems)
    assert "The soak is not passed." in verdict.format()
    assert json.loads(json.dumps(verdict.to_json()))["holds"] is False


def test_a_server_that_is_down_is_a_problem() -> None:
    with serve_planned() as url:
        pass
    assert Client(url).post(b"{}")[0] == 0
    tally = keep_busy(url, mix(), users=2, seconds=0.2)
    assert tally.errors == tally.sent == 3  # of both users, and of the client that hangs up
    verdict = Verdict(1, 2, tally, [], flat(), "a test")
    assert "nothing was answered" in verdict.problems


def test_every_kind_of_request_has_the_planned_status_and_tokens() -> None:
    """The fake server plans with the plugin's own code: status and tokens of many draws."""
    random, seen, models = Random(3), set(), set()
    with serve_planned() as url:
        for _ in range(150):
            ask = mix().draw(random)
            models.add(json.loads(ask.body)["model"])
            status, text = Client(url).post(ask.body)
            assert status == ask.status, (ask.kind, text)
            if status == 200:
                assert json.loads(text)["usage"]["prompt_tokens"] == 20 + ask.after
            seen.add(ask.kind)
    assert seen == {name for name, _ in KINDS}
    assert {"first", "second", "model"} == models


def test_pictures_vary() -> None:
    random, bodies = Random(0), set()
    for _ in range(60):
        bodies.add(mix().draw(random).body)
    assert len(bodies) > 40


def test_counts_of_the_server_alone_are_compared_with_zero() -> None:
    lines = compare_counts({}, {"autoprune_requests_total mine": 2.0}, Tally(), KV_BYTES)
    assert CountPair("autoprune_requests_total mine", 0.0, 2.0) in lines


def test_counters_are_summed_over_engines() -> None:
    exposition = "".join(f'vllm:prompt_tokens_total{{engine="{i}"}} 3.0\n' for i in range(2))
    assert read_counters(exposition + "vllm:other_total 5.0\n") == {"vllm:prompt_tokens_total": 6.0}


def test_the_command_writes_json_and_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Verdict(2.0, 4, Tally(sent=1, answered=1), [], flat(), "a test")
    bad = Verdict(2.0, 4, Tally(sent=1, errors=1), [], flat(), "a test")
    for verdict, status in ((good, 0), (bad, 1)):
        monkeypatch.setattr(command, "soak", lambda *asked, verdict=verdict: verdict)
        assert main(["soak", "--minutes", "2", "--out", str(tmp_path / "soak")]) == status
        written = json.loads((tmp_path / "soak" / "soak.json").read_text())
        assert written["holds"] is (status == 0)
        assert written["samples"]["resident"][0] == {"1 vllm": 1 << 30}
    assert "1 errors" in capsys.readouterr().out


def test_a_client_that_hangs_up_is_counted_by_what_it_has_read() -> None:
    random = Random(5)
    with serve_planned() as url:
        request = mix().draw_stream(random)
        killed = hang_up(url, request.body, 4)
        assert (killed.error, killed.answer_tokens) == ("", 3)  # the first event names the role
        tally = Tally()
        tally.add_killed(request, killed)
        lines = compare_counts({}, metrics(url), tally, KV_BYTES)
    assert all(line.equal for line in lines)
    (tokens,) = (line for line in lines if line.name == "vllm:generation_tokens_total")
    assert (tokens.client, tokens.server, tokens.unseen) == (3, LONG_ANSWER, LONG_ANSWER - 3)


def test_a_stream_that_ends_or_is_refused_is_an_error() -> None:
    with fake_server(Reply(deltas=("one",), first=0.0)) as server:
        body = json.dumps({"model": "mock", "stream": True, "stream_options": USAGE}).encode()
        assert "ended before" in hang_up(server.url, body, 50).error
        refused = hang_up(server.url, b'{"model": "another"}', 1).error
    assert "HTTP 404" in refused


def test_more_answer_tokens_than_the_client_read_are_counted_up_to_a_bound() -> None:
    assert CountPair("tokens", 3, 10, unseen=7).equal
    assert not CountPair("tokens", 3, 11, unseen=7).equal
    assert not CountPair("tokens", 3, 2, unseen=7).equal


def test_an_answer_that_ended_after_its_client_hung_up_is_told_apart_by_its_length() -> None:
    tally = Tally(answered=5, killed=2)
    ended, short = "vllm:request_success_total", "vllm:request_generation_tokens_bucket 5.0"

    def equal(ended_by_server: float, short_by_server: float) -> bool:
        after = {ended: ended_by_server, short: short_by_server}
        return all(pair.equal for pair in compare_counts({}, after, tally, KV_BYTES))

    assert equal(5, 5)
    assert equal(7, 5)
    assert not equal(8, 5)
    assert not equal(6, 6)
    assert not equal(5, 4)
