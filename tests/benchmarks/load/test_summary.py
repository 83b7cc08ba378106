"""The summary of one run: measured requests, rates, goodput."""

from __future__ import annotations

import pytest

from benchmarks.load.result import format_result
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.summary import summarize
from tests.benchmarks.load.samples import record, result


def test_rates_are_over_the_whole_time_and_latencies_over_answers() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.2, gap=0.1, tokens=4) for n in range(10)]
    records.append(record(10, scheduled=5.0, error="cut short"))
    summary = summarize(records, Slo(ttft=1.0))
    # From 0 to the end of the failed request at 5 + 0.2 + 3 x 0.05.
    assert summary.seconds == pytest.approx(5.35)
    assert (summary.requests, summary.failed) == (11, 1)
    assert summary.request_rate == pytest.approx(10 / 5.35)
    assert summary.image_rate == pytest.approx(10 / 5.35)
    assert summary.output_token_rate == pytest.approx(40 / 5.35)
    assert summary.offered_rate == pytest.approx(10 / 5.0)
    assert summary.ttft is not None and summary.ttft.count == 10
    assert summary.ttft.at(50).value == pytest.approx(0.2)
    assert summary.itl is not None and summary.itl.count == 30
    assert summary.tpot is not None and summary.tpot.at(99).value == pytest.approx(0.1)
    assert summary.e2e is not None and summary.e2e.at(50).value == pytest.approx(0.5)
    assert summary.prompt_tokens == 600


def test_a_failed_request_misses_the_objective() -> None:
    records = [record(n, ttft=0.1 * n - 0.01) for n in range(1, 5)]
    records += [record(5, ttft=0.1, error="refused"), record(6, ttft=0.1, gap=0.5)]
    summary = summarize(records, Slo(ttft=0.3, tpot=0.4))
    assert summary.goodput is not None
    assert summary.goodput.value == pytest.approx(3 / 6)
    assert summary.good_rate == pytest.approx(3 / summary.seconds)


def test_ramp_and_drain_are_not_summarized() -> None:
    records = [
        record(0, ttft=9.0, phase="ramp"),
        record(1, ttft=0.2),
        record(2, ttft=0.2, phase="drain"),
        record(3, ttft=9.0, phase="warm-up"),
    ]
    summary = summarize(records, Slo())
    assert (
        summary.requests == 1
        and summary.ttft is not None
        and summary.ttft.mean == pytest.approx(0.2)
    )


def test_no_requests_give_no_latencies() -> None:
    summary = summarize([], Slo())
    assert summary.requests == 0 and summary.ttft is None and summary.goodput is None
    assert summary.request_rate == 0 and summary.offered_rate is None


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
    assert Load(rate=1.0).describe() == "open loop, Poisson arrivals at 1 request/s"
    assert Load(users=1).describe() == "closed loop, 1 user"
    assert Load(rate=2.0).describe() == "open loop, Poisson arrivals at 2 requests/s"


def test_a_run_at_a_rate_states_the_offered_and_the_achieved_rate() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.5, gap=0.0) for n in range(11)]
    lines = "\n".join(format_result(result(records, Load(rate=2.0))))
    assert "2.00 offered, 2.00 achieved requests/s" in lines
    closed = "\n".join(format_result(result(records, Load(users=1))))
    assert "offered" not in closed and "2.00 requests/s" in closed


def test_a_busy_machine_is_warned_about_under_the_verdict() -> None:
    calm = result([record(n) for n in range(4)], Load(users=1))
    busy = calm.model_copy(update={"environment": {"load average": "2.10", "cores": "2"}})
    assert "warning" not in "\n".join(format_result(calm))
    assert list(format_result(busy))[1].startswith("  warning: load average 2.10 on 2 cores")
