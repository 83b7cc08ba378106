"""The result of one run: percentiles, rates, goodput, every reason against it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.client import Record
from benchmarks.common.metrics import ServerMetrics
from benchmarks.load.result import (
    ClientFacts,
    RunFacts,
    Verdict,
    distribution,
    draw_percentiles,
    format_result,
    judge_run,
    ratio,
    resample_weights,
    share,
    summarize,
    write_requests_csv,
)
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import Cache, Workload
from tests.benchmarks.load.samples import CALM, record, result

OPEN, CLOSED = Load(rate=10.0), Load(users=2)
READ = ServerMetrics(read=True, mm_cache_hits=0, prefix_cache_hits=0)
ANSWERED = [record(n, scheduled=0.1 * n) for n in range(200)]


def single(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


def test_percentiles_are_nearest_rank() -> None:
    result = distribution(single([float(n) for n in range(1, 101)]))
    assert result is not None
    assert [result.at(level).value for level in (50, 90, 95, 99)] == [50, 90, 95, 99]
    assert (result.count, result.mean) == (100, 50.5)


def test_intervals_have_their_nominal_coverage() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        result = distribution(single(list(generator.exponential(1.0, 150))))
        assert result is not None
        estimate = result.at(50)
        covered += estimate.low <= np.log(2) <= estimate.high
    assert 33 <= covered <= 40


def test_correlated_neighbours_widen_the_interval() -> None:
    """The same values in waves and shuffled: blocks of neighbours are resampled."""
    waves = list(np.sin(np.arange(400) / 40) + 2)
    shuffled = list(np.random.default_rng(0).permutation(waves))

    def width(values: list[float]) -> float:
        result = distribution(single(values))
        assert result is not None
        return result.at(50).high - result.at(50).low

    assert width(waves) > 2 * width(shuffled)


def test_gaps_of_a_request_are_resampled_together() -> None:
    """Two kinds of requests; if gaps were resampled singly, the interval would be too narrow."""
    mixed = [[1.0] * 50 if n % 2 else [2.0] * 50 for n in range(8)]
    result = distribution(mixed)
    assert result is not None
    assert (result.at(50).low, result.at(50).high) == (1.0, 2.0)


def test_every_resample_has_the_size_of_the_sample() -> None:
    counts = resample_weights(37)
    assert (counts[0] == 1).all() and (counts.sum(axis=1) == 37).all()


def test_paired_ratios_recover_a_common_factor_exactly() -> None:
    base = [float(v) for v in np.random.default_rng(1).exponential(1.0, 60)]
    result = ratio(single([0.5 * v for v in base]), single(base), 99)
    assert result is not None
    assert (result.value, result.low, result.high) == pytest.approx((0.5, 0.5, 0.5))


def test_samples_of_different_length_are_not_paired() -> None:
    with pytest.raises(ValueError, match="3 requests cannot be paired with 2"):
        ratio(single([1, 2, 3]), single([1, 2]), 50)
    assert ratio([[]], [[1.0]], 50) is None


def test_few_requests_are_flagged() -> None:
    result = distribution(single([1.0] * 60))
    assert result is not None
    assert [q.level for q in result.quantiles if not q.enough] == [95, 99]


def test_empty_samples_give_none() -> None:
    assert distribution([]) is None and distribution([[], []]) is None and share([]) is None


def test_shares_and_resampling_weights() -> None:
    result = share([True, True, False, True])
    assert result is not None and result.value == 0.75
    weights = np.array([[0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    assert np.allclose(
        draw_percentiles([[1.0], [2.0, 3.0]], [50, 99], weights),
        [[2.0, 3.0], [1.0, 1.0], [np.nan, np.nan]],
        equal_nan=True,
    )


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


def test_requests_are_given_as_csv(tmp_path: Path) -> None:
    records = [record(0, scheduled=1.0, ttft=0.25), record(1, error='status 500: a, "b"')]
    write_requests_csv(records, tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open() as file:
        first, second = csv.DictReader(file)
    assert float(first["ttft"]) == pytest.approx(0.25) and first["error"] == ""
    assert second["ttft"] == "" and second["error"] == 'status 500: a, "b"'


def verdict(
    records: Sequence[Record] = ANSWERED,
    load: Load = OPEN,
    *,
    planned: int | None = None,
    client: ClientFacts = CALM,
    unwritten: str | None = None,
    broken: str | None = None,
    metrics: ServerMetrics = READ,
    cache: Cache = "unique",
) -> Verdict:
    facts = RunFacts(
        planned=len(records) if planned is None else planned,
        clients=(client,),
        unwritten=unwritten,
        broken=broken,
    )
    workload = Workload(model="mock", output_tokens=4, cache=cache)
    return judge_run(workload, load, records, facts, summarize(records, Slo()), metrics)


def test_a_good_run_is_valid_without_a_note() -> None:
    assert verdict() == Verdict() and verdict().valid
    assert verdict(load=CLOSED).valid


def test_a_late_client_invalidates() -> None:
    late = [record(n, scheduled=0.1 * n, delay=0.011) for n in range(200)]
    (reason,) = verdict(late).reasons
    assert "schedule delay is 11.0 ms at p99, above 5 % of the median TTFT (10.0 ms)" in reason
    # A closed loop has no schedule; the lag of an idle greenlet is used there.
    assert verdict(late, CLOSED).valid
    lagging = CALM.model_copy(update={"lag_p99": 0.011})
    assert "wake-up lag is 11.0 ms" in verdict(load=CLOSED, client=lagging).reasons[0]
    assert verdict(client=lagging).valid


def test_a_client_that_saturates_its_core_invalidates() -> None:
    (reason,) = verdict(client=CALM.model_copy(update={"cpu": 0.97})).reasons
    assert "client 0 used 97 % of a core" in reason


def test_failures_above_one_per_cent_invalidate_with_the_most_frequent() -> None:
    some = [record(n, error="status 500: gone") for n in range(3)]
    (reason,) = verdict([*ANSWERED[3:], *some]).reasons
    assert reason == "3 of 200 requests failed; 3 with: status 500: gone"
    assert verdict([*ANSWERED[2:], *some[:2]]).valid


def test_missing_usage_and_wrong_lengths_invalidate() -> None:
    silent = [r.model_copy(update={"completion_tokens": None}) for r in ANSWERED]
    assert "200 answers came without usage" in verdict(silent).reasons[0]
    short = [record(n, tokens=3) for n in range(200)]
    assert "200 answers are not of 4 tokens (one: 3)" in verdict(short).reasons[0]


def test_incomplete_runs_invalidate() -> None:
    assert "the schedule is empty" in verdict([], planned=0).reasons
    assert "only 200 of 300 requests were recorded" in verdict(planned=300).reasons
    assert "a worker was lost" in verdict(broken="a worker was lost").reasons
    (reason,) = verdict(unwritten="[Errno 28] No space left on device").reasons
    assert reason == "records could not be written: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("cache", "metrics", "message"),
    [
        ("unique", {"mm_cache_hits": 3}, "cache state is 'unique', but 3 images came from a cache"),
        ("off", {"mm_cache_hits": 3}, "cache state is 'off', but 3 images"),
        ("off", {"prefix_cache_hits": 32}, "32 prompt tokens came from the prefix cache"),
    ],
)
def test_cache_hits_against_the_declared_state_invalidate(
    cache: Cache, metrics: dict[str, float], message: str
) -> None:
    (reason,) = verdict(cache=cache, metrics=READ.model_copy(update=metrics)).reasons
    assert message in reason


@pytest.mark.parametrize("cache", ["repeat", "same-image"])
def test_expected_cache_hits_are_valid(cache: Cache) -> None:
    hit = READ.model_copy(update={"mm_cache_hits": 30, "prefix_cache_hits": 3000})
    assert verdict(cache=cache, metrics=hit).valid


def test_other_clients_of_the_server_invalidate() -> None:
    busy = READ.model_copy(update={"finished": 203.0})
    (reason,) = verdict(metrics=busy).reasons
    assert reason == "the server also answered 3 requests of other clients"
    assert verdict(metrics=READ.model_copy(update={"finished": 202.0})).valid


def test_too_few_requests_are_in_the_headline() -> None:
    assert verdict(ANSWERED[:50]).describe() == (
        "valid, but 50 requests are too few for p99 (200 needed)"
    )
    assert verdict(ANSWERED[:8]).describe() == (
        "valid, but 8 requests are too few for a verdict (20 needed)"
    )
    assert verdict().describe() == "valid"


def test_all_reasons_are_reported() -> None:
    late = [record(n, scheduled=0.1 * n, delay=0.5, tokens=3) for n in range(100)]
    result = verdict(late, planned=101, unwritten="disk full")
    assert len(result.reasons) == 4
    assert result.describe().startswith("not valid: only 100 of 101")


def test_notes_do_not_invalidate() -> None:
    result = verdict(ANSWERED[:50], metrics=ServerMetrics())
    assert result.valid
    assert "/metrics could not be read" in result.notes[0]
    slow = [record(n, scheduled=0.1 * n, ttft=20.0) for n in range(200)]
    assert verdict(slow).notes == ("the server completed 4.99 of 10.00 requests/s offered",)
