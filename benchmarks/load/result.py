"""Result of one run: percentiles with bootstrap intervals, rates, goodput, and the verdict.

Percentiles are nearest rank: always a measured value. Neighbouring requests share a queue, so they
are resampled in blocks of about sqrt(n); resampled one by one, intervals would be too narrow.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Record, ServerMetrics
from benchmarks.common.report import format_estimate
from benchmarks.load.settings import Load, Slo, Workload
from vllm_autoprune.record_file import FrozenModel, read_records
from vllm_autoprune.statistics import Estimate, Floats, estimate, resample

RESULT, RECORDS = "run.json", "records.jsonl"

LEVELS = (50, 90, 95, 99)
ENOUGH = {50: 20, 90: 50, 95: 100, 99: 200}
"""Requests that a percentile needs to be quoted."""
KEPT_UP = 0.95
"""Share of the offered rate that a server which keeps up completes."""
_DRAWS = 1000
_DELAY_SHARE = 0.05
"""Limit of the client's p99 delay, as a share of the median TTFT."""
_BUSY = 0.9
"""Share of a CPU core above which a client's time stamps are not trusted, as in locust."""
_FOREIGN_REQUESTS = 0.01
"""Limit of the requests of other clients of the server, as a share of our own."""
_FAILED_SHARE = 0.01
"""Limit of failed requests, because latencies are of the others only."""

LATENCIES: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "TTFT": lambda record: (record.ttft,),
    "ITL": lambda record: record.gaps,
    "TPOT": lambda record: () if record.tpot is None else (record.tpot,),
    "E2E": lambda record: (record.e2e,),
}
"""The seconds that one answered request contributes to each kind of latency."""


_RECORD = TypeAdapter(Record)


class Journal:
    """A JSONL file of records, and all of them in memory, whether or not they could be written.

    Unlike ``RecordFile`` it does not wait for the disk: that would delay the time stamps of a load
    client in the same process.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self.failure: str | None = None
        """Why the file is not complete."""
        self._file: TextIOWrapper | None = None
        with self._noting_failure():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1)  # what is added reaches the kernel at once

    def add(self, record: Record) -> None:
        """Append one record; where that fails it is kept in memory, and ``failure`` is set."""
        self.records.append(record)
        if self._file is not None and self.failure is None:
            with self._noting_failure():
                self._file.write(record.model_dump_json() + "\n")

    def close(self) -> None:
        """Close the file; on a full disk, what its buffer still has is lost."""
        if self._file is not None:
            with self._noting_failure():
                self._file.close()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or str(error)


def read_journal(path: Path) -> list[Record]:
    """All records of a file, by index; an incomplete last line is ignored.

    Raises :class:`BenchmarkError` where the file cannot be read or contains anything else.
    """
    fix = "name the folder of a finished run"
    records = read_records(path, _RECORD, BenchmarkError, fix)
    return sorted(records, key=lambda record: record.index)


class _Quantile(FrozenModel):
    """One percentile."""

    level: int
    estimate: Estimate
    enough: bool
    """Whether there are enough requests to estimate it."""


class Distribution(FrozenModel):
    """Mean and percentiles of a sample."""

    count: int
    """Values, not requests."""
    mean: float
    quantiles: tuple[_Quantile, ...]

    def at(self, level: int) -> Estimate:
        """The estimate of one percentile, which is one of LEVELS."""
        return next(q.estimate for q in self.quantiles if q.level == level)


def _resample_weights(requests: int) -> Floats:
    """How often each request occurs in the sample and in each resample, (1 + draws, requests)."""
    rows = resample(requests, _DRAWS, block=max(1, round(requests**0.5)))
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
    values = np.asarray([value for row in by_request for value in row], dtype=np.float64)
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
    values = [value for row in by_request for value in row]
    if not values:
        return None
    percentiles = draw_percentiles(by_request, LEVELS, _resample_weights(len(by_request)))
    quantiles = tuple(
        _Quantile(level=level, estimate=estimate(column), enough=len(by_request) >= ENOUGH[level])
        for level, column in zip(LEVELS, percentiles.T, strict=True)
    )
    return Distribution(count=len(values), mean=float(np.mean(values)), quantiles=quantiles)


def ratio(
    over: Mapping[int, Sequence[float]], under: Mapping[int, Sequence[float]], level: int
) -> Estimate | None:
    """percentile(over) / percentile(under) of the requests that both have, resampled together.

    Values by request; None where either has no value.
    """
    common = sorted(over.keys() & under.keys())
    pair = [[values[index] for index in common] for values in (over, under)]
    if not all(any(map(len, rows)) for rows in pair):
        return None
    weights = _resample_weights(len(common))
    upper, lower = (draw_percentiles(rows, [level], weights)[:, 0] for rows in pair)
    return estimate(upper / lower)


class Summary(FrozenModel):
    """Seconds and counts over the measured requests; latencies are of answered ones."""

    requests: int
    failed: int
    seconds: float
    """From the first request that was due to the end of the last; of several passes, the mean."""
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

    def latency(self, name: str) -> Distribution | None:
        """One of :data:`LATENCIES`."""
        times: Distribution | None = getattr(self, name.lower())
        return times


def values_by_request(
    passes: Sequence[Sequence[Record]], values: Callable[[Record], Sequence[float]]
) -> dict[int, list[float]]:
    """Values of the measured requests that were answered, of all passes, by their index."""
    by_index: dict[int, list[float]] = {}
    for record in (record for records in passes for record in records):
        if record.phase == "measured" and record.ok:
            by_index.setdefault(record.index, []).extend(values(record))
    return dict(sorted(by_index.items()))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def summarize(passes: Sequence[Sequence[Record]], slo: Slo) -> Summary:
    """The summary of the measured requests of one or several passes over the same requests.

    Rates are means over the passes; values of one request are resampled together.
    """
    counted = [
        sorted((r for r in records if r.phase == "measured"), key=lambda r: r.index)
        for records in passes
    ]
    measured = [record for records in counted for record in records]
    good = [record for record in measured if record.ok]
    seconds = [
        max((r.done for r in records), default=0.0)
        - min((r.scheduled for r in records), default=0.0)
        for records in counted
    ]

    def rate(count: Callable[[Record], float]) -> float:
        """Sum of a figure a second."""
        pairs = zip(counted, seconds, strict=True)
        rates = [sum(map(count, records)) / s if s > 0 else 0.0 for records, s in pairs]
        return _mean(rates) or 0.0

    spans = [rows[-1].scheduled - rows[0].scheduled if rows else 0.0 for rows in counted]
    pairs = zip(counted, spans, strict=True)
    met = np.asarray([slo.good(record) for record in measured], dtype=np.float64)
    shares = _resample_weights(len(met)) @ met / len(met) if len(met) else None
    times = {
        name.lower(): distribution([*values_by_request(passes, values).values()])
        for name, values in LATENCIES.items()
    }
    return Summary(
        **times,
        requests=len(measured),
        failed=len(measured) - len(good),
        seconds=_mean(seconds) or 0.0,
        delay=distribution([[r.delay] for r in measured]),
        goodput=None if shares is None else estimate(shares),
        good_rate=rate(slo.good),
        offered_rate=_mean([(len(rows) - 1) / span if span > 0 else None for rows, span in pairs]),
        request_rate=rate(lambda r: r.ok),
        image_rate=rate(lambda r: r.images if r.ok else 0),
        output_token_rate=rate(lambda r: (r.completion_tokens or 0) if r.ok else 0),
        prompt_tokens=_mean([r.prompt_tokens for r in good]),
    )


class ClientFacts(FrozenModel):
    """One client process."""

    worker: int = 0
    cpu: float
    """Share of one CPU core used while requests were sent."""
    lag_p50: float
    lag_p99: float
    """Seconds by which an idle greenlet woke up late: the error of its time stamps."""
    broken: str | None = None
    """Why it stopped before its share was sent; None where it did not."""


class RunFacts(FrozenModel):
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


class Verdict(FrozenModel):
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


class Result(FrozenModel):
    """One run; its records are in ``records.jsonl`` beside it."""

    label: str
    url: str
    began: str
    """UTC, ISO 8601."""
    workload: Workload
    workload_digest: str
    load: Load
    slo: Slo
    verdict: Verdict = Verdict()
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


def say_too_few(requests: int, where: str = "") -> str:
    """That these are too few requests for a percentile; empty where they are enough."""
    for level, what in ((50, "a verdict"), (99, "p99")):
        if 0 < requests < ENOUGH[level]:
            return f"{requests} requests{where} are too few for {what} ({ENOUGH[level]} needed)"
    return ""


def judge_run(result: Result, records: Sequence[Record]) -> Verdict:
    """The verdict, with every reason; no figure of an invalid run is compared."""
    notes, summary = [], result.summary
    if not result.metrics.read:
        notes.append(
            "the server's /metrics could not be read: no cache hits, KV use or visual tokens"
        )
    offered, achieved = summary.offered_rate, summary.request_rate
    if result.load.rate is not None and offered and achieved < KEPT_UP * offered:
        notes.append(f"the server completed {achieved:.2f} of {offered:.2f} requests/s offered")
    return Verdict(
        reasons=tuple(_list_reasons(result, records)),
        notes=tuple(notes),
        too_few=say_too_few(summary.requests),
    )


def _list_reasons(result: Result, records: Sequence[Record]) -> Iterator[str]:
    """Every reason why a run is not valid."""
    workload, facts, summary, metrics = (
        result.workload, result.facts, result.summary, result.metrics,
    )  # fmt: skip
    # Requests that were not sent or recorded, failed, or were answered at another length.
    if not facts.planned:
        yield "the schedule is empty"
    yield from facts.early
    if len(records) < facts.planned:
        yield f"only {len(records)} of {facts.planned} requests were recorded"
    if facts.unwritten:
        yield f"records could not be written: {facts.unwritten}"
    failed = Counter(record.error for record in records if record.error)
    if failed.total() > _FAILED_SHARE * len(records):
        worst, times = failed.most_common(1)[0]
        yield f"{failed.total()} of {len(records)} requests failed; {times} with: {worst}"
    lengths = [record.completion_tokens for record in records if record.ok]
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
    # A client that used up its core, or was late itself.
    for client in [client for client in facts.clients if client.cpu > _BUSY][:1]:
        yield (
            f"client {client.worker} used {100 * client.cpu:.0f} % of a core: it was the "
            "bottleneck; give it more workers"
        )
    # A closed loop has no schedule, so there it is the lag of the clients' idle greenlets.
    if result.load.rate is not None:
        delay, name = summary.delay.at(99).value if summary.delay else 0.0, "its schedule delay"
    else:
        delay = max((client.lag_p99 for client in facts.clients), default=0.0)
        name = "its wake-up lag"
    if summary.ttft and delay > (bound := _DELAY_SHARE * summary.ttft.at(50).value):
        yield (
            f"the client was the bottleneck: {name} is {1000 * delay:.1f} ms at p99, above "
            f"{100 * _DELAY_SHARE:.0f} % of the median TTFT ({1000 * bound:.1f} ms)"
        )
    # Cache hits that the declared state of the caches excludes. Requests with unique images share
    # the tokens before them, so these may hit the prefix cache.
    images, prefix = metrics.mm_cache_hits or 0.0, metrics.prefix_cache_hits or 0.0
    if workload.cache in ("unique", "off") and images:
        yield f"cache state is {workload.cache!r}, but {images:.0f} images came from a cache"
    if workload.cache == "off" and prefix:
        yield f"cache state is 'off', but {prefix:.0f} prompt tokens came from the prefix cache"
    foreign = (metrics.finished or 0.0) - len(records)
    if foreign > max(_FOREIGN_REQUESTS * len(records), 2):
        yield f"the server also answered {foreign:.0f} requests of other clients"


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
    for name in (*LATENCIES, "delay"):
        if (values := summary.latency(name)) is not None:
            # A dagger marks a percentile that rests on too few requests.
            percentiles = "  ".join(
                f"p{q.level} {format_estimate(q.estimate, 1000)}{'' if q.enough else '†'}"
                for q in values.quantiles
            )
            yield f"  {'client delay' if name == 'delay' else name:12s} ms: {percentiles}"
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
