"""A soak of a fake server: equal counts on both sides, and every fault detected."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from random import Random

import pytest

from benchmarks.common.client import Client
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
from benchmarks.cost.soak.memory import Samples
from benchmarks.cost.soak.requests import RequestMix
from tests.benchmarks.cost.soak.fake_server import BUDGET, KV_BYTES, TOKENS, Faults, serve_planned
from tests.serving.unit.samples import served


def mix() -> RequestMix:
    return RequestMix("model", TOKENS, served().state.name, BUDGET)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return dict(read_counters(answer.read().decode()))


def soaked(url: str, seconds: float = 1.5) -> Verdict:
    before = metrics(url)
    tally = keep_busy(url, mix().draw, users=4, seconds=seconds)
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
    tally = keep_busy(url, mix().draw, users=2, seconds=0.2)
    assert tally.errors == tally.sent == 2
    verdict = Verdict(1, 2, tally, [], flat(), "a test")
    assert "nothing was answered" in verdict.problems


def test_every_kind_of_request_has_the_planned_status_and_tokens() -> None:
    """The fake server plans with the plugin's own code: status and tokens of many draws."""
    random, seen = Random(3), set()
    with serve_planned() as url:
        for _ in range(150):
            ask = mix().draw(random)
            status, text = Client(url).post(ask.body)
            assert status == ask.status, (ask.kind, text)
            if status == 200:
                assert json.loads(text)["usage"]["prompt_tokens"] == 20 + ask.after
            seen.add(ask.kind)
    assert seen == {"plain", "budget", "policy", "own", "control", "off", "two", "bad"}


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
