"""Whether a run is valid, and all reasons why not; no figure of an invalid run is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.common import StrictModel
from benchmarks.common.metrics import ServerMetrics
from benchmarks.common.request_record import Record
from benchmarks.load.messages import RunFacts
from benchmarks.load.percentiles import ENOUGH
from benchmarks.load.schedule import Load
from benchmarks.load.settings import Workload
from benchmarks.load.summary import Summary

DELAY_SHARE = 0.05
"""Limit of the client's p99 delay, as a share of the median TTFT."""
BUSY = 0.9
"""Share of a CPU core above which a client's time stamps are not trusted, as in locust."""
KEPT_UP = 0.95
"""Share of the offered rate that a server which keeps up completes."""
FOREIGN_REQUESTS = 0.01
"""Limit of the requests of other clients of the server, as a share of our own."""
FAILED_SHARE = 0.01
"""Limit of failed requests, because latencies are of the others only."""


class Verdict(StrictModel):
    """Valid if there is no reason against it; notes do not invalidate a run."""

    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    too_few: str = ""
    """That there are too few requests for a percentile, or for any verdict."""

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the run."""
        return not self.reasons

    def describe(self) -> str:
        """In words."""
        if not self.valid:
            return f"not valid: {'; '.join(self.reasons)}"
        return f"valid, but {self.too_few}" if self.too_few else "valid"


def judge_run(
    workload: Workload,
    load: Load,
    records: Sequence[Record],
    facts: RunFacts,
    summary: Summary,
    metrics: ServerMetrics,
) -> Verdict:
    """The verdict, with every reason."""
    return Verdict(
        reasons=tuple(
            reason
            for part in (
                _complete(records, facts),
                _answers(workload, records),
                _client(load, facts, summary),
                _caches(workload, metrics),
                _others(records, metrics),
            )
            for reason in part
        ),
        too_few=_describe_few(summary),
        notes=tuple(_notes(load, summary, metrics)),
    )


def _describe_few(summary: Summary) -> str:
    if 0 < summary.requests < ENOUGH[50]:
        return f"{summary.requests} requests are too few for a verdict ({ENOUGH[50]} needed)"
    if 0 < summary.requests < ENOUGH[99]:
        return f"{summary.requests} requests are too few for p99 ({ENOUGH[99]} needed)"
    return ""


def _complete(records: Sequence[Record], facts: RunFacts) -> Iterator[str]:
    if not facts.planned:
        yield "the schedule is empty"
    yield from facts.early
    counted = [record for record in records if record.phase != "warm-up"]
    if len(counted) < facts.planned:
        yield f"only {len(counted)} of {facts.planned} requests were recorded"
    if facts.unwritten:
        yield f"records could not be written: {facts.unwritten}"


def _answers(workload: Workload, records: Sequence[Record]) -> Iterator[str]:
    counted = [record for record in records if record.phase != "warm-up"]
    failed = Counter(record.error for record in counted if record.error)
    if sum(failed.values()) > FAILED_SHARE * len(counted):
        worst, times = failed.most_common(1)[0]
        yield f"{sum(failed.values())} of {len(counted)} requests failed; {times} with: {worst}"
    good = [record for record in counted if record.ok]
    without_usage = sum(record.completion_tokens is None for record in good)
    if without_usage:
        yield f"{without_usage} answers came without usage, so their tokens cannot be counted"
    other = [
        record.completion_tokens
        for record in good
        if record.completion_tokens not in (None, workload.output_tokens)
    ]
    if other and workload.dialect == "vllm":
        yield (
            f"{len(other)} answers are not of {workload.output_tokens} tokens (one: {other[0]}): "
            "a shorter answer would be taken for a faster one"
        )


def _client(load: Load, facts: RunFacts, summary: Summary) -> Iterator[str]:
    busy = [client for client in facts.clients if client.cpu > BUSY]
    if busy:
        yield (
            f"client {busy[0].worker} used {100 * busy[0].cpu:.0f} % of a core: it was the "
            "bottleneck; give it more workers"
        )
    delay, name = client_delay(load, facts, summary)
    if summary.ttft is None or delay is None:
        return
    bound = DELAY_SHARE * summary.ttft.at(50).value
    if delay > bound:
        yield (
            f"the client was the bottleneck: {name} is {1000 * delay:.1f} ms at p99, above "
            f"{100 * DELAY_SHARE:.0f} % of the median TTFT ({1000 * bound:.1f} ms)"
        )


def client_delay(load: Load, facts: RunFacts, summary: Summary) -> tuple[float | None, str]:
    """The client's own delay at p99, seconds, and its name.

    A closed loop has no schedule, so there it is the lag of the clients' idle greenlets.
    """
    if load.rate is not None:
        return (summary.delay.at(99).value if summary.delay else None), "its schedule delay"
    return max((client.lag_p99 for client in facts.clients), default=None), "its wake-up lag"


def _caches(workload: Workload, metrics: ServerMetrics) -> Iterator[str]:
    """Cache hits that the declared state of the caches excludes.

    Requests with unique images share the tokens before them, so these may hit the prefix cache.
    """
    images, prefix = metrics.mm_cache_hits or 0.0, metrics.prefix_cache_hits or 0.0
    if workload.cache in ("unique", "off") and images:
        yield f"cache state is {workload.cache!r}, but {images:.0f} images came from a cache"
    if workload.cache == "off" and prefix:
        yield f"cache state is 'off', but {prefix:.0f} prompt tokens came from the prefix cache"


def _others(records: Sequence[Record], metrics: ServerMetrics) -> Iterator[str]:
    """Other clients of the server."""
    others = (metrics.finished or 0.0) - len(records)
    if others > max(FOREIGN_REQUESTS * len(records), 2):
        yield f"the server also answered {others:.0f} requests of other clients"


def _notes(load: Load, summary: Summary, metrics: ServerMetrics) -> Iterator[str]:
    if not metrics.read:
        yield "the server's /metrics could not be read: no cache hits, KV use or visual tokens"
    offered = summary.offered_rate
    if load.rate is not None and offered and summary.request_rate < KEPT_UP * offered:
        yield f"the server completed {summary.request_rate:.2f} of {offered:.2f} requests/s offered"
