"""One run in figures: latencies, rates and goodput, from its records.

Knows nothing about whether the run may be believed (``verdict`` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.load.load import Slo
from benchmarks.load.plain import Plain
from benchmarks.load.record import Record, answered
from benchmarks.load.statistics import Distribution, Estimate, distribution, share


class Summary(Plain):
    """Seconds and counts over the requests that count; failed ones are in no latency."""

    requests: int
    failed: int
    seconds: float
    """From the first request that was due to the end of the last."""
    ttft: Distribution | None
    itl: Distribution | None
    """Gaps between deltas; a delta may hold more than one token."""
    tpot: Distribution | None
    e2e: Distribution | None
    delay: Distribution | None
    """By how much the client itself was late."""
    goodput: Estimate | None
    """Share of requests that kept the declared promises; a failed one kept none."""
    good_rate: float
    """Good requests a second, over the whole time."""
    offered_rate: float | None
    """Requests a second as they were due: the schedule's own rate, not the one it was drawn for."""
    request_rate: float
    image_rate: float
    output_token_rate: float
    """Shown, never ranked by: pruning lowers prompt tokens, and answers have a fixed length."""
    prompt_tokens: float | None
    """Mean, as the server counts them."""
    cached_tokens: float | None
    body_bytes: float


def summarize(records: Iterable[Record], slo: Slo) -> Summary:
    """All that counts of ``records``, in the order of the schedule."""
    counted = sorted((r for r in records if r.phase == "measured"), key=lambda r: r.index)
    good = answered(counted)
    seconds = max((r.done for r in counted), default=0.0)
    seconds -= min((r.scheduled for r in counted), default=0.0)
    per_second = 1 / seconds if seconds > 0 else 0.0
    kept = [slo.good(record) for record in counted]
    span = counted[-1].scheduled - counted[0].scheduled if counted else 0.0
    return Summary(
        requests=len(counted),
        failed=len(counted) - len(good),
        seconds=seconds,
        ttft=distribution([[r.ttft] for r in good]),
        itl=distribution([r.gaps for r in good]),
        tpot=distribution([_some(r.tpot) for r in good]),
        e2e=distribution([[r.e2e] for r in good]),
        delay=distribution([[r.delay] for r in counted]),
        goodput=share(kept),
        good_rate=sum(kept) * per_second,
        offered_rate=(len(counted) - 1) / span if span > 0 else None,
        request_rate=len(good) * per_second,
        image_rate=sum(r.images for r in good) * per_second,
        output_token_rate=sum(r.completion_tokens or 0 for r in good) * per_second,
        prompt_tokens=_mean([r.prompt_tokens for r in good]),
        cached_tokens=_mean([r.cached_tokens for r in good]),
        body_bytes=_mean([r.body_bytes for r in counted]) or 0.0,
    )


def _some(value: float | None) -> Sequence[float]:
    return () if value is None else (value,)


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
