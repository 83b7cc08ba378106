"""Summary of one run: latencies, rates and goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.common import StrictModel
from benchmarks.common.request_record import Record, answered
from benchmarks.load.percentiles import Distribution, distribution, share
from benchmarks.load.schedule import Slo
from vllm_autoprune.statistics import Estimate


class Summary(StrictModel):
    """Seconds and counts over the measured requests; latencies are of answered ones."""

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
    """Seconds by which the client itself was late."""
    goodput: Estimate | None
    """Share of requests that met the objective; failed ones did not."""
    good_rate: float
    """Good requests a second, over the whole time."""
    offered_rate: float | None
    """Requests a second by the schedule as it was drawn."""
    request_rate: float
    image_rate: float
    output_token_rate: float
    """For information: answers have a fixed length."""
    prompt_tokens: float | None
    """Mean, as the server counts them."""
    cached_tokens: float | None
    body_bytes: float


def summarize(records: Iterable[Record], slo: Slo) -> Summary:
    """The summary of the measured requests among ``records``."""
    counted = sorted((r for r in records if r.phase == "measured"), key=lambda r: r.index)
    good = answered(counted)
    seconds = max((r.done for r in counted), default=0.0)
    seconds -= min((r.scheduled for r in counted), default=0.0)
    per_second = 1 / seconds if seconds > 0 else 0.0
    met = [slo.good(record) for record in counted]
    span = counted[-1].scheduled - counted[0].scheduled if counted else 0.0
    return Summary(
        requests=len(counted),
        failed=len(counted) - len(good),
        seconds=seconds,
        ttft=distribution([[r.ttft] for r in good]),
        itl=distribution([r.gaps for r in good]),
        tpot=distribution([_as_tuple(r.tpot) for r in good]),
        e2e=distribution([[r.e2e] for r in good]),
        delay=distribution([[r.delay] for r in counted]),
        goodput=share(met),
        good_rate=sum(met) * per_second,
        offered_rate=(len(counted) - 1) / span if span > 0 else None,
        request_rate=len(good) * per_second,
        image_rate=sum(r.images for r in good) * per_second,
        output_token_rate=sum(r.completion_tokens or 0 for r in good) * per_second,
        prompt_tokens=_mean([r.prompt_tokens for r in good]),
        cached_tokens=_mean([r.cached_tokens for r in good]),
        body_bytes=_mean([r.body_bytes for r in counted]) or 0.0,
    )


def _as_tuple(value: float | None) -> Sequence[float]:
    return () if value is None else (value,)


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
