"""Result of one run: percentiles with bootstrap intervals, rates, goodput, and the verdict.

Percentiles are nearest rank: always a measured value. Neighbouring requests share a queue, so they
are resampled in blocks of about sqrt(n); resampled one by one, intervals would be too narrow.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import Record, answered
from benchmarks.common.metrics import ServerMetrics
from benchmarks.common.report import format_estimate
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import Workload
from vllm_autoprune.statistics import Estimate, Floats, estimate, resample

RESULT, RECORDS, REQUESTS_CSV = "run.json", "records.jsonl", "requests.csv"

LEVELS = (50, 90, 95, 99)
DRAWS = 1000
ENOUGH = {50: 20, 90: 50, 95: 100, 99: 200}
"""Requests that a percentile needs to be quoted."""
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


class Quantile(StrictModel):
    """One percentile."""

    level: int
    estimate: Estimate
    enough: bool
    """Whether there are enough requests to estimate it."""


class Distribution(StrictModel):
    """Mean and percentiles of a sample."""

    count: int
    """Values, not requests."""
    mean: float
    quantiles: tuple[Quantile, ...]

    def at(self, level: int) -> Estimate:
        """The estimate of one percentile, which is one of LEVELS."""
        return next(q.estimate for q in self.quantiles if q.level == level)


def resample_weights(requests: int) -> Floats:
    """How often each request occurs in the sample and in each resample, (1 + draws, requests)."""
    rows = resample(requests, DRAWS, block=max(1, round(requests**0.5)))
    counts = np.zeros((len(rows), requests))
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1.0)
    return counts


def draw_percentiles(
    by_request: Sequence[Sequence[float]], levels: Sequence[int], weights: Floats
) -> Floats:
    """Nearest-rank percentiles (draws, levels) of the values of all requests, V > 0 of them.

    ``weights`` (draws, requests): how often each request was drawn, with all its values. NaN where
    a draw has no value.
    """
    owners = np.repeat(np.arange(len(by_request)), [len(values) for values in by_request])
    values = np.asarray([value for one in by_request for value in one], dtype=np.float64)
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    percentiles = np.full((len(weights), len(levels)), np.nan)
    for number, drawn in enumerate(weights):
        reached = np.cumsum(drawn[owners])
        if reached[-1]:
            # Rounding must not push a rank that is met exactly on to the next value.
            places = np.searchsorted(reached, np.asarray(levels) / 100 * reached[-1] - 1e-9)
            percentiles[number] = values[places]
    return percentiles


def distribution(by_request: Sequence[Sequence[float]]) -> Distribution | None:
    """Percentiles of the values of all requests; None where there is no value."""
    values = [value for one in by_request for value in one]
    if not values:
        return None
    percentiles = draw_percentiles(by_request, LEVELS, resample_weights(len(by_request)))
    quantiles = tuple(
        Quantile(level=level, estimate=estimate(column), enough=len(by_request) >= ENOUGH[level])
        for level, column in zip(LEVELS, percentiles.T, strict=True)
    )
    return Distribution(count=len(values), mean=float(np.mean(values)), quantiles=quantiles)


def share(good: Sequence[bool]) -> Estimate | None:
    """The share of requests that are good; None where there is no request."""
    if not good:
        return None
    values = np.asarray(good, dtype=np.float64)
    return estimate(resample_weights(len(values)) @ values / len(values))


def ratio(
    over: Sequence[Sequence[float]], under: Sequence[Sequence[float]], level: int
) -> Estimate | None:
    """percentile(over) / percentile(under); both list the same requests, resampled together.

    None where either has no value. Raises ValueError where the lists differ in length.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} requests cannot be paired with {len(under)}")
    if not any(map(len, over)) or not any(map(len, under)):
        return None
    weights = resample_weights(len(over))
    first, second = (draw_percentiles(each, [level], weights)[:, 0] for each in (over, under))
    return estimate(first / second)


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

    def mean(values: Sequence[int | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return Summary(
        requests=len(counted),
        failed=len(counted) - len(good),
        seconds=seconds,
        ttft=distribution([[r.ttft] for r in good]),
        itl=distribution([r.gaps for r in good]),
        tpot=distribution([[] if r.tpot is None else [r.tpot] for r in good]),
        e2e=distribution([[r.e2e] for r in good]),
        delay=distribution([[r.delay] for r in counted]),
        goodput=share(met),
        good_rate=sum(met) * per_second,
        offered_rate=(len(counted) - 1) / span if span > 0 else None,
        request_rate=len(good) * per_second,
        image_rate=sum(r.images for r in good) * per_second,
        output_token_rate=sum(r.completion_tokens or 0 for r in good) * per_second,
        prompt_tokens=mean([r.prompt_tokens for r in good]),
        cached_tokens=mean([r.cached_tokens for r in good]),
        body_bytes=mean([r.body_bytes for r in counted]) or 0.0,
    )


class ClientFacts(StrictModel):
    """One client process."""

    worker: int = 0
    cpu: float
    """Share of one CPU core used while requests were sent."""
    lag_p50: float
    lag_p99: float
    """Seconds by which an idle greenlet woke up late: the error of its time stamps."""
    broken: str | None = None
    """Why it stopped before its share was sent; None where it did not."""


class RunFacts(StrictModel):
    """All client processes of a run."""

    planned: int
    clients: tuple[ClientFacts, ...] = ()
    unwritten: str | None = None
    """Why records could not be written."""
    broken: str | None = None
    """Why the run ended early, where no client reports it."""

    @property
    def early(self) -> Sequence[str]:
        """Every reason for an early end, each once."""
        reasons = [self.broken, *(client.broken for client in self.clients)]
        return tuple(dict.fromkeys(reason for reason in reasons if reason))


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
    """The verdict, with every reason; no figure of an invalid run is compared."""
    notes, too_few = [], ""
    if not metrics.read:
        notes.append(
            "the server's /metrics could not be read: no cache hits, KV use or visual tokens"
        )
    offered, achieved = summary.offered_rate, summary.request_rate
    if load.rate is not None and offered and achieved < KEPT_UP * offered:
        notes.append(f"the server completed {achieved:.2f} of {offered:.2f} requests/s offered")
    if 0 < summary.requests < ENOUGH[50]:
        too_few = f"{summary.requests} requests are too few for a verdict ({ENOUGH[50]} needed)"
    elif 0 < summary.requests < ENOUGH[99]:
        too_few = f"{summary.requests} requests are too few for p99 ({ENOUGH[99]} needed)"
    reasons = (
        *_judge_answers(workload, records, facts),
        *_judge_client(load, facts, summary),
        *_judge_server(workload, len(records), metrics),
    )
    return Verdict(reasons=reasons, notes=tuple(notes), too_few=too_few)


def _judge_answers(workload: Workload, records: Sequence[Record], facts: RunFacts) -> Iterator[str]:
    """Requests that were not sent or recorded, failed, or were answered at another length."""
    counted = [record for record in records if record.phase != "warm-up"]
    if not facts.planned:
        yield "the schedule is empty"
    yield from facts.early
    if len(counted) < facts.planned:
        yield f"only {len(counted)} of {facts.planned} requests were recorded"
    if facts.unwritten:
        yield f"records could not be written: {facts.unwritten}"
    failed = Counter(record.error for record in counted if record.error)
    if failed.total() > FAILED_SHARE * len(counted):
        worst, times = failed.most_common(1)[0]
        yield f"{failed.total()} of {len(counted)} requests failed; {times} with: {worst}"
    lengths = [record.completion_tokens for record in counted if record.ok]
    if None in lengths:
        yield (
            f"{lengths.count(None)} answers came without usage, so their tokens cannot be counted"
        )
    other = [length for length in lengths if length not in (None, workload.output_tokens)]
    if other and workload.dialect == "vllm":
        yield (
            f"{len(other)} answers are not of {workload.output_tokens} tokens (one: {other[0]}): "
            "a shorter answer would be taken for a faster one"
        )


def _judge_client(load: Load, facts: RunFacts, summary: Summary) -> Iterator[str]:
    """A client that used up its core, or was late itself."""
    for client in [client for client in facts.clients if client.cpu > BUSY][:1]:
        yield (
            f"client {client.worker} used {100 * client.cpu:.0f} % of a core: it was the "
            "bottleneck; give it more workers"
        )
    # A closed loop has no schedule, so there it is the lag of the clients' idle greenlets.
    if load.rate is not None:
        delay, name = summary.delay.at(99).value if summary.delay else 0.0, "its schedule delay"
    else:
        delay = max((client.lag_p99 for client in facts.clients), default=0.0)
        name = "its wake-up lag"
    if summary.ttft and delay > (bound := DELAY_SHARE * summary.ttft.at(50).value):
        yield (
            f"the client was the bottleneck: {name} is {1000 * delay:.1f} ms at p99, above "
            f"{100 * DELAY_SHARE:.0f} % of the median TTFT ({1000 * bound:.1f} ms)"
        )


def _judge_server(workload: Workload, sent: int, metrics: ServerMetrics) -> Iterator[str]:
    """Cache hits that the declared state of the caches excludes, and other clients.

    Requests with unique images share the tokens before them, so these may hit the prefix cache.
    """
    images, prefix = metrics.mm_cache_hits or 0.0, metrics.prefix_cache_hits or 0.0
    if workload.cache in ("unique", "off") and images:
        yield f"cache state is {workload.cache!r}, but {images:.0f} images came from a cache"
    if workload.cache == "off" and prefix:
        yield f"cache state is 'off', but {prefix:.0f} prompt tokens came from the prefix cache"
    others = (metrics.finished or 0.0) - sent
    if others > max(FOREIGN_REQUESTS * sent, 2):
        yield f"the server also answered {others:.0f} requests of other clients"


class Result(StrictModel):
    """One run; its records are in ``records.jsonl`` beside it."""

    label: str
    url: str
    began: str
    """UTC, ISO 8601."""
    workload: Workload
    workload_digest: str
    load: Load
    slo: Slo
    verdict: Verdict
    summary: Summary
    metrics: ServerMetrics
    facts: RunFacts
    server: Mapping[str, str] = {}
    """Version and state, as the server reports them."""
    environment: Mapping[str, str]
    """Of the client."""
    command: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write ``run.json``; raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).write_text(self.model_dump_json(indent=1) + "\n")


def read_result(folder: Path) -> Result:
    """The run in a folder; raises :class:`BenchmarkError` where there is none."""
    try:
        return Result.model_validate_json((folder / RESULT).read_text())
    except (OSError, ValidationError) as error:
        raise BenchmarkError(f"{folder / RESULT}: {str(error).splitlines()[0]}") from error


def format_result(result: Result) -> Iterator[str]:
    """Verdict first, then figures, a line each."""
    summary, metrics = result.summary, result.metrics
    yield f"{result.label}: {result.load.describe()}; {result.verdict.describe()}"
    busy, cores = result.environment["load average"], result.environment["cores"]
    if float(busy) > int(cores):
        yield f"  warning: load average {busy} on {cores} cores before the run: use an idle machine"
    for note in result.verdict.notes:
        yield f"  note: {note}"
    rates = f"{summary.request_rate:.2f}"
    if result.load.rate is not None and summary.offered_rate is not None:
        rates = f"{summary.offered_rate:.2f} offered, {rates} achieved"
    yield (
        f"  {summary.requests} requests counted, {summary.failed} failed, in "
        f"{summary.seconds:.1f} s: {rates} requests/s, {summary.image_rate:.2f} images/s, "
        f"{summary.output_token_rate:.1f} output tokens/s"
    )
    for name, values in (
        ("TTFT", summary.ttft),
        ("ITL", summary.itl),
        ("TPOT", summary.tpot),
        ("E2E", summary.e2e),
        ("client delay", summary.delay),
    ):
        if values is not None:
            # A dagger marks a percentile that rests on too few requests.
            percentiles = "  ".join(
                f"p{q.level} {format_estimate(q.estimate, 1000)}{'' if q.enough else '†'}"
                for q in values.quantiles
            )
            yield f"  {name:12s} ms: {percentiles}"
    if summary.goodput is not None:
        good = format_estimate(summary.goodput, 100)
        yield f"  goodput: {good} % of requests met {result.slo.describe()}"
    before, after = metrics.visual_tokens_before, metrics.visual_tokens_after
    if before is not None and after is not None:
        yield f"  visual tokens: {before:.0f} before, {after:.0f} after pruning"
    if metrics.peak_kv_use is not None:
        yield f"  KV cache: {100 * metrics.peak_kv_use:.1f} % used at the peak"
    yield (
        f"  caches: {format_hits(metrics.mm_cache_hits, metrics.mm_cache_queries)} images, "
        f"{format_hits(metrics.prefix_cache_hits, metrics.prefix_cache_queries)} prompt tokens"
    )


def format_hits(hits: float | None, queries: float | None) -> str:
    """Such as "12 of 40"; "not counted" where the server does not report it."""
    return "not counted" if hits is None or queries is None else f"{hits:.0f} of {queries:.0f}"


def write_requests_csv(records: Iterable[Record], path: Path) -> None:
    """One line a request, times in seconds; raises OSError."""
    columns = (
        "index", "phase", "worker", "scheduled", "started", "ttft", "tpot", "e2e", "status",
        "prompt_tokens", "completion_tokens", "cached_tokens", "images", "body_bytes", "error",
    )  # fmt: skip
    times = ("ttft", "tpot", "e2e")
    write_csv(
        path,
        [
            {name: getattr(r, name) if r.ok or name not in times else None for name in columns}
            for r in records
        ],
    )


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A CSV file whose columns are the keys of the first row; raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
