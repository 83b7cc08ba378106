"""The result of one run: percentiles, rates, goodput, every reason against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from benchmarks.common.client import Phase, ServerMetrics
from benchmarks.load.result import (
    RunFacts,
    Verdict,
    distribution,
    draw_percentiles,
    format_result,
    judge_run,
    ratio,
    summarize,
)
from benchmarks.load.settings import Load, Slo, Workload
from tests.benchmarks.load.samples import CALM, record, result

OPEN, CLOSED = Load(rate=10.0), Load(users=2)
READ = ServerMetrics(read=True, mm_cache_hits=0, prefix_cache_hits=0)
UNCHANGED: Mapping[str, float] = {}
ANSWERED = [record(n, scheduled=0.1 * n) for n in range(200)]


def single(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


def test_percentiles_are_nearest_rank() -> None:
    sample = distribution(single([float(n) for n in range(1, 101)]))
    assert sample is not None
    assert [sample.at(level).value for level in (50, 90, 95, 99)] == [50, 90, 95, 99]
    assert (sample.count, sample.mean) == (100, 50.5)
    assert [q.level for q in sample.quantiles if not q.enough] == [99]
    weights = np.array([[0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    assert np.allclose(
        draw_percentiles([[1.0], [2.0, 3.0]], [50, 99], weights),
        [[2.0, 3.0], [1.0, 1.0], [np.nan, np.nan]],
        equal_nan=True,
    )
    assert distribution([]) is None and distribution([[], []]) is None


def test_intervals_have_their_nominal_coverage() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        sample = distribution(single(list(generator.exponential(1.0, 150))))
        assert sample is not None
        covered += sample.at(50).low <= np.log(2) <= sample.at(50).high
    assert 33 <= covered <= 40


def test_correlated_values_widen_the_interval() -> None:
    """The same values in waves and shuffled: blocks of neighbours are resampled."""

    def width(by_request: list[list[float]]) -> float:
        sample = distribution(by_request)
        assert sample is not None
        return sample.at(50).high - sample.at(50).low

    waves = list(np.sin(np.arange(400) / 40) + 2)
    shuffled = list(np.random.default_rng(0).permutation(waves))
    assert width(single(waves)) > 2 * width(single(shuffled))
    # Gaps of a request are resampled together: of two kinds of requests, the interval has both.
    assert width([[1.0] * 50 if n % 2 else [2.0] * 50 for n in range(8)]) == 1.0


def test_paired_ratios_recover_a_common_factor_exactly() -> None:
    base = {n: [float(v)] for n, v in enumerate(np.random.default_rng(1).exponential(1.0, 60))}
    half = {n: [0.5 * value for value in values] for n, values in base.items() if n != 7}
    estimate = ratio(half, base, 99)  # of the requests that both answered
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))
    assert ratio({0: []}, {0: [1.0]}, 50) is None and ratio({0: [1.0]}, {1: [1.0]}, 50) is None


def test_rates_are_over_the_whole_time_and_latencies_over_answers() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.2, gap=0.1, tokens=4) for n in range(10)]
    records.append(record(10, scheduled=5.0, error="cut short"))
    for passes in (1, 2):  # of several passes, rates are means
        summary = summarize([records] * passes, Slo(ttft=1.0))
        # From 0 to the end of the failed request at 5 + 0.2 + 3 x 0.05.
        assert summary.seconds == pytest.approx(5.35)
        assert (summary.requests, summary.failed) == (11 * passes, passes)
        assert summary.request_rate == summary.image_rate == pytest.approx(10 / 5.35)
        assert summary.output_token_rate == pytest.approx(40 / 5.35)
        assert summary.offered_rate == pytest.approx(10 / 5.0)
        assert summary.ttft is not None and summary.ttft.count == 10 * passes
        assert summary.ttft.at(50).value == pytest.approx(0.2)
        assert summary.itl is not None and summary.itl.count == 30 * passes
        assert summary.tpot is not None and summary.tpot.at(99).value == pytest.approx(0.1)
        assert summary.e2e is not None and summary.e2e.at(50).value == pytest.approx(0.5)
        assert summary.prompt_tokens == 600


def test_a_failed_request_misses_the_objective() -> None:
    records = [record(n, ttft=0.1 * n - 0.01) for n in range(1, 5)]
    records += [record(5, ttft=0.1, error="refused"), record(6, ttft=0.1, gap=0.5)]
    summary = summarize([records], Slo(ttft=0.3, tpot=0.4))
    assert summary.goodput is not None and summary.goodput.value == pytest.approx(3 / 6)
    assert summary.good_rate == pytest.approx(3 / summary.seconds)


def test_only_measured_requests_are_summarized() -> None:
    phases: tuple[Phase, ...] = ("ramp", "measured", "drain", "warm-up")
    records = [record(n, ttft=0.2 if p == "measured" else 9, phase=p) for n, p in enumerate(phases)]
    summary = summarize([records], Slo())
    assert summary.requests == 1 and summary.ttft is not None
    assert summary.ttft.mean == pytest.approx(0.2)
    empty = summarize([[]], Slo())
    assert empty.requests == 0 and empty.ttft is None and empty.goodput is None
    assert empty.request_rate == 0 and empty.offered_rate is None


def test_a_run_is_printed_with_its_rates_and_a_warning_of_a_busy_machine() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.5, gap=0.0) for n in range(11)]
    opened = result(records, Load(rate=2.0))
    assert "2.00 offered, 2.00 achieved requests/s" in "\n".join(format_result(opened))
    closed = "\n".join(format_result(result(records, Load(users=1))))
    assert "offered" not in closed and "2.00 requests/s" in closed and "warning" not in closed
    busy = opened.model_copy(update={"environment": {"load average": "2.10", "cores": "2"}})
    assert list(format_result(busy))[1].startswith("  warning: load average 2.10 on 2 cores")


LATE = [record(n, scheduled=0.1 * n, delay=0.011) for n in range(200)]
SILENT = [r.model_copy(update={"completion_tokens": None}) for r in ANSWERED]
FAILED = [record(n, error="status 500: gone") for n in range(3)]

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a good run": ({}, ()),
    "a good closed loop": ({"load": CLOSED}, ()),
    "a late client": (
        {"records": LATE},
        ("schedule delay is 11.0 ms at p99, above 5 % of the median TTFT (10.0 ms)",),
    ),
    "a closed loop has no schedule": ({"records": LATE, "load": CLOSED}, ()),
    "a lagging client": ({"load": CLOSED, "client": {"lag_p99": 0.011}}, ("lag is 11.0 ms",)),
    "an open loop has delays": ({"client": {"lag_p99": 0.011}}, ()),
    "a busy client": ({"client": {"cpu": 0.97}}, ("client 0 used 97 % of a core",)),
    "failures": (
        {"records": [*ANSWERED[3:], *FAILED]},
        ("3 of 200 requests failed; 3 with: status 500: gone",),
    ),
    "one per cent of failures": ({"records": [*ANSWERED[2:], *FAILED[:2]]}, ()),
    "no usage": ({"records": SILENT}, ("200 answers came without usage",)),
    "other lengths": (
        {"records": [record(n, scheduled=0.1 * n, tokens=3) for n in range(200)]},
        ("200 answers are not of 4 tokens (one: 3)",),
    ),
    "an empty schedule": ({"records": [], "planned": 0}, ("the schedule is empty",)),
    "missing records": ({"planned": 300}, ("only 200 of 300 requests were recorded",)),
    "a lost worker": ({"broken": "a worker was lost"}, ("a worker was lost",)),
    "a full disk": ({"unwritten": "[Errno 28]"}, ("records could not be written: [Errno 28]",)),
    "hits of unique images": (
        {"metrics": {"mm_cache_hits": 3}},
        ("cache state is 'unique', but 3 images came from a cache",),
    ),
    "image hits without caches": (
        {"cache": "off", "metrics": {"mm_cache_hits": 3}},
        ("cache state is 'off', but 3 images",),
    ),
    "prefix hits without caches": (
        {"cache": "off", "metrics": {"prefix_cache_hits": 32}},
        ("32 prompt tokens came from the prefix cache",),
    ),
    "hits of repeated requests": (
        {"cache": "repeat", "metrics": {"mm_cache_hits": 30, "prefix_cache_hits": 3000}},
        (),
    ),
    "other clients": (
        {"metrics": {"finished": 203.0}},
        ("the server also answered 3 requests of other clients",),
    ),
    "hardly another client": ({"metrics": {"finished": 202.0}}, ()),
    "all at once": (
        {"records": LATE[:100], "planned": 101, "unwritten": "disk full"},
        ("only 100 of 101", "disk full", "schedule delay"),
    ),
}
"""Changes to a good run, and what each reason against it contains."""


def verdict(
    records: list[Any] = ANSWERED,
    load: Load = OPEN,
    *,
    planned: int | None = None,
    client: Mapping[str, float] = UNCHANGED,
    metrics: Mapping[str, float] = UNCHANGED,
    cache: str = "unique",
    **facts: Any,
) -> Verdict:
    run = result(
        records,
        load,
        workload=Workload.model_validate({"model": "mock", "output_tokens": 4, "cache": cache}),
        metrics=READ.model_copy(update=metrics),
        facts=RunFacts(
            planned=len(records) if planned is None else planned,
            clients=(CALM.model_copy(update=client),),
            **facts,
        ),
    )
    return judge_run(run, records)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_valid_or_has_every_reason_against_it(case: str) -> None:
    changes, wanted = CASES[case]
    reasons = verdict(**changes).reasons
    assert len(reasons) == len(wanted)
    assert all(part in reason for part, reason in zip(wanted, reasons, strict=True))


def test_few_requests_and_missing_metrics_are_told_without_invalidating() -> None:
    few, fewer = verdict(ANSWERED[:50]), verdict(ANSWERED[:8])
    assert few.describe() == "valid, but 50 requests are too few for p99 (200 needed)"
    assert fewer.describe() == "valid, but 8 requests are too few for a verdict (20 needed)"
    assert verdict().describe() == "valid"
    unread = verdict(metrics={"read": False})
    assert unread.valid and "/metrics could not be read" in unread.notes[0]
    slow = [record(n, scheduled=0.1 * n, ttft=20.0) for n in range(200)]
    assert verdict(slow).notes == ("the server completed 4.99 of 10.00 requests/s offered",)
