"""Every reason for which a run is invalid, and none for a good run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.common.metrics import ServerMetrics
from benchmarks.common.request_record import Record
from benchmarks.load.messages import ClientFacts, RunFacts
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import Cache, Workload
from benchmarks.load.summary import summarize
from benchmarks.load.verdict import Verdict, judge_run
from tests.benchmarks.load.samples import CALM, record

OPEN, CLOSED = Load(rate=10.0), Load(users=2)
READ = ServerMetrics(read=True, mm_cache_hits=0, prefix_cache_hits=0)
ANSWERED = [record(n, scheduled=0.1 * n) for n in range(200)]


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
