"""One run in figures: what counts, what does not, and in which unit."""

from __future__ import annotations

import pytest

from benchmarks.load.schedule import Load, Slo
from benchmarks.load.summary import summarize
from tests.benchmarks.load.samples import record


def test_rates_are_over_the_whole_time_and_latencies_over_answers() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.2, gap=0.1, tokens=4) for n in range(10)]
    records.append(record(10, scheduled=5.0, error="cut short"))
    found = summarize(records, Slo(ttft=1.0))
    # From 0 to the end of the failed request at 5 + 0.2 + 3 x 0.05.
    assert found.seconds == pytest.approx(5.35)
    assert (found.requests, found.failed) == (11, 1)
    assert found.request_rate == pytest.approx(10 / 5.35)
    assert found.image_rate == pytest.approx(10 / 5.35)
    assert found.output_token_rate == pytest.approx(40 / 5.35)
    assert found.offered_rate == pytest.approx(10 / 5.0)
    assert found.ttft is not None and found.ttft.count == 10
    assert found.ttft.at(50).value == pytest.approx(0.2)
    assert found.itl is not None and found.itl.count == 30
    assert found.tpot is not None and found.tpot.at(99).value == pytest.approx(0.1)
    assert found.e2e is not None and found.e2e.at(50).value == pytest.approx(0.5)
    assert found.prompt_tokens == 600


def test_a_failed_request_misses_the_objective() -> None:
    records = [record(n, ttft=0.1 * n - 0.01) for n in range(1, 5)]
    records += [record(5, ttft=0.1, error="refused"), record(6, ttft=0.1, gap=0.5)]
    found = summarize(records, Slo(ttft=0.3, tpot=0.4))
    assert found.goodput is not None
    assert found.goodput.value == pytest.approx(3 / 6)
    assert found.good_rate == pytest.approx(3 / found.seconds)


def test_ramp_and_drain_are_not_summarized() -> None:
    records = [
        record(0, ttft=9.0, phase="ramp"),
        record(1, ttft=0.2),
        record(2, ttft=0.2, phase="drain"),
        record(3, ttft=9.0, phase="warm-up"),
    ]
    found = summarize(records, Slo())
    assert found.requests == 1 and found.ttft is not None and found.ttft.mean == pytest.approx(0.2)


def test_no_requests_give_no_latencies() -> None:
    found = summarize([], Slo())
    assert found.requests == 0 and found.ttft is None and found.goodput is None
    assert found.request_rate == 0 and found.offered_rate is None


def test_phases_exclude_ramp_and_drain() -> None:
    closed = Load(users=3).phases(20)
    assert closed == ["ramp"] * 3 + ["measured"] * 14 + ["drain"] * 3
    assert Load(rate=2.0).phases(40) == ["ramp"] * 2 + ["measured"] * 38
    # Where nothing would be left, everything counts.
    assert Load(users=16).phases(20) == ["measured"] * 20


def test_a_load_has_either_a_rate_or_users() -> None:
    with pytest.raises(ValueError, match="open loop"):
        Load()
    with pytest.raises(ValueError, match="open loop"):
        Load(rate=1.0, users=2)
    assert Load(users=2).due(3) == [0.0, 0.0, 0.0]
    assert Load(rate=2.0).describe() == "open loop, Poisson arrivals at 2 requests/s"
