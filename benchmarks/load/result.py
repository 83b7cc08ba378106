"""Result of one run: percentiles with bootstrap intervals, rates, goodput, and the verdict.

A percentile is the nearest rank, so it is always a measured value. Neighbouring requests share a
queue, so they are resampled in blocks of about sqrt(n); if they were resampled one by one, the
intervals would be too narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.common.client import Record
from benchmarks.common.report import format_estimate
from benchmarks.load.settings import RunOptions, SendingOptions, Workload
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, Floats, resample

RESULT = "run.json"
RECORDS = "records.jsonl"

COUNTERS = {
    "image hits": "vllm:mm_cache_hits_total",
    "prefix hits": "vllm:prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
}
"""Counters of the server's ``/metrics`` that show what else made a run fast or slow."""

_ENOUGH = {50: 20, 90: 50, 95: 100, 99: 200}
"""Number of requests from which on a percentile may be quoted, by percentile."""
_DRAWS = 1000
_DELAY_SHARE = 0.05
"""Limit of the client's p99 delay, as a share of the median TTFT."""
_BUSY = 0.9
"""Share of a CPU core above which a client's time stamps are not trusted, as in locust."""
_FOREIGN_REQUESTS = 0.01
"""Limit of the requests of other clients, as a share of the requests of this run."""
_FAILED_SHARE = 0.01
"""Limit of the share of failed requests, since latencies cover only the answered ones."""

_LATENCIES: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "TTFT": lambda record: (record.ttft,),
    "TTFAT": lambda record: () if record.ttfat is None else (record.ttfat,),
    "ITL": lambda record: record.gaps,
    "TPOT": lambda record: () if record.tpot is None else (record.tpot,),
    "E2E": lambda record: (record.e2e,),
}
"""The seconds that one answered request contributes to each kind of latency."""

_Percentiles = Mapping[int, Estimate]
"""Estimates by percentile, 50 to 99."""


def _resample_weights(requests: int) -> Floats:
    """Block-bootstrap weights (1 + draws, requests): how often each request occurs in a draw.

    Row 0 is the sample itself.
    """
    rows = resample(requests, _DRAWS, block=max(1, round(requests**0.5)))
    counts = np.zeros((len(rows), requests))
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1.0)
    return counts


def _draw_percentiles(
    by_request: Sequence[Sequence[float]], levels: Sequence[int], weights: Floats
) -> Floats:
    """Weighted nearest-rank percentiles (draws, levels) of the values of all requests.

    ``weights`` (draws, requests) say how often each draw has a request, with all its values. The
    percentiles of a draw without any value are NaN.
    """
    owners = np.repeat(
        np.arange(len(by_request)), [len(values) for values in by_request]
    )
    values = np.asarray(
        [value for row in by_request for value in row], dtype=np.float64
    )
    order = np.argsort(values, kind="stable")
    values = values[order]
    owners = owners[order]
    percentiles = np.full((len(weights), len(levels)), np.nan)
    for number, drawn in enumerate(weights):
        reached = np.cumsum(drawn[owners])
        if reached[-1]:
            # Rounding must not move a rank that is met exactly to the next value.
            places = np.searchsorted(
                reached, np.asarray(levels) / 100 * reached[-1] - 1e-9
            )
            percentiles[number] = values[places]
    return percentiles


def _estimate_percentiles(by_request: Sequence[Sequence[float]]) -> _Percentiles:
    """Percentiles of the values of all requests, with bootstrap intervals; empty without values."""
    if not any(map(len, by_request)):
        return {}
    percentiles = _draw_percentiles(
        by_request, [*_ENOUGH], _resample_weights(len(by_request))
    )
    return dict(zip(_ENOUGH, map(Estimate.of, percentiles.T), strict=True))


def estimate_ratio(
    over: Sequence[Sequence[Record]],
    under: Sequence[Sequence[Record]],
    latency: str,
    level: int,
) -> Estimate | None:
    """Paired-bootstrap ratio of a percentile of two arms, over the requests that both answered.

    ``over`` (numerator) and ``under`` have the records of all passes of an arm. The ratio is None
    if the requests of either arm have no value.
    """
    upper, lower = (_values_by_request(passes, latency) for passes in (over, under))
    common = sorted(upper.keys() & lower.keys())
    pair = [[values[index] for index in common] for values in (upper, lower)]
    if not all(any(map(len, rows)) for rows in pair):
        return None
    weights = _resample_weights(len(common))
    numerator, denominator = (
        _draw_percentiles(rows, [level], weights)[:, 0] for rows in pair
    )
    return Estimate.of(numerator / denominator)


def _values_by_request(
    passes: Sequence[Sequence[Record]], latency: str
) -> dict[int, list[float]]:
    """Values of the measured and answered requests of all passes, by index of the request."""
    by_index: dict[int, list[float]] = {}
    for record in (record for records in passes for record in records):
        if record.measured and record.ok:
            by_index.setdefault(record.index, []).extend(_LATENCIES[latency](record))
    return dict(sorted(by_index.items()))


def describe_few(requests: int, where: str = "") -> str:
    """Warning that ``requests`` are too few for a percentile; empty if they are enough."""
    for level, what in ((50, "a verdict"), (99, "p99")):
        if 0 < requests < _ENOUGH[level]:
            return f"{requests} requests{where} are too few for {what} ({_ENOUGH[level]} needed)"
    return ""


class Summary(FrozenModel):
    """Seconds and counts over the measured requests; latencies cover the answered ones."""

    requests: int
    failed: int
    answered: int
    """Number of distinct requests that were answered in any pass."""
    seconds: float
    """Seconds from the time when the first request was due to the end of the last; of several
    passes, the mean."""
    latencies: Mapping[str, _Percentiles]
    """Percentiles by name of the latency: those of :data:`_LATENCIES`, and the client's
    ``delay``."""
    goodput: Estimate | None
    """Share of requests that met the objective; failed requests did not."""
    offered_rate: float | None
    """Requests a second in the schedule."""
    request_rate: float
    prompt_tokens: float
    """Mean number of prompt tokens, as the server counts them."""

    @property
    def thinks(self) -> bool:
        """Whether a model thinks before it answers, so that TTFAT differs from TTFT."""
        return self.latencies["TTFAT"] != self.latencies["TTFT"]

    def percentile(self, latency: str, level: int) -> Estimate | None:
        """Percentile of a latency in seconds; None if no answered request has a value of it."""
        return self.latencies[latency].get(level)

    def mark_few(self, level: int) -> str:
        """A dagger if the percentile rests on too few requests, else an empty text."""
        return "" if self.answered >= _ENOUGH[level] else "†"

    @classmethod
    def of(cls, passes: Sequence[Sequence[Record]], slo: SendingOptions) -> Summary:
        """Summarize the measured requests of one or several passes over the same requests.

        Rates are means over the passes. Bootstrap draws resample all values of a request together.
        """
        counted = [
            sorted((r for r in records if r.measured), key=lambda r: r.index)
            for records in passes
        ]
        measured = [record for records in counted for record in records]
        good = [record for record in measured if record.ok]
        seconds = list[float]()
        rates = list[float]()
        offered = list[float]()
        for records in filter(None, counted):
            span = records[-1].scheduled - records[0].scheduled
            offered += [(len(records) - 1) / span] if span else []
            seconds.append(
                max(r.done for r in records) - min(r.scheduled for r in records)
            )
            rates.append(sum(r.ok for r in records) / seconds[-1])
        met = np.asarray([slo.is_good(record) for record in measured], dtype=np.float64)
        by_latency = {
            name: [*_values_by_request(passes, name).values()] for name in _LATENCIES
        }
        by_latency["delay"] = [[record.delay] for record in measured]
        return cls(
            requests=len(measured),
            failed=len(measured) - len(good),
            answered=len({record.index for record in good}),
            seconds=mean(seconds or [0.0]),
            latencies={
                name: _estimate_percentiles(values)
                for name, values in by_latency.items()
            },
            goodput=Estimate.of(_resample_weights(len(met)) @ met / len(met))
            if len(met)
            else None,
            offered_rate=mean(offered) if offered else None,
            request_rate=mean(rates or [0.0]),
            prompt_tokens=mean([r.prompt_tokens or 0 for r in good] or [0]),
        )


class Result(FrozenModel):
    """Result of one run; its records are in ``records.jsonl`` beside it."""

    workload: Workload
    options: RunOptions
    summary: Summary
    counters: Mapping[str, float] | None
    """Increase of :data:`COUNTERS` during the run; None if ``/metrics`` could not be read."""
    cpu: float
    """Share of one CPU core that the client used while requests were sent."""
    lag: float
    """Seconds by which an idle greenlet of the client woke up late, p99."""
    broken: str = ""
    """Why the run ended early; empty if it did not."""
    environment: Mapping[str, str]
    """Versions and machine of the client."""
    reasons: tuple[str, ...] = ()
    """Reasons why the run is not valid."""
    accepted: tuple[str, ...] = ()
    """Interference that ``--shared`` accepts; without this option it would be among the reasons."""

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the run."""
        return not self.reasons

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.valid:
            return f"not valid: {'; '.join(self.reasons)}"
        unread = (
            ""
            if self.counters is not None
            else "the server's /metrics could not be read"
        )
        limits = [*self.accepted, describe_few(self.summary.requests), unread]
        limits = [limit for limit in limits if limit]
        return f"valid, but {', and '.join(limits)}" if limits else "valid"

    def write(self, folder: Path, records: Sequence[Record]) -> None:
        """Write a run and its records; raises :class:`OSError`. The result is written last."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = (record.model_dump_json() + "\n" for record in records)
        (folder / RECORDS).write_text("".join(lines))
        (folder / RESULT).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> tuple[Result, list[Record]]:
        """Read a run and its records, sorted by index."""
        result = cls.model_validate_json((folder / RESULT).read_bytes())
        lines = (folder / RECORDS).read_text().splitlines()
        records = map(Record.model_validate_json, lines)
        return result, sorted(records, key=lambda record: record.index)

    def list_reasons(self, records: Sequence[Record]) -> Iterator[str]:
        """Every reason why a run is not valid; figures of such a run are not compared."""
        workload = self.workload
        counters = self.counters or {}
        # Requests that were not sent or not recorded, that failed, or whose answer has another
        # length.
        if self.broken:
            yield self.broken
        if len(records) < workload.requests:
            yield f"only {len(records)} of {workload.requests} requests were recorded"
        failed = Counter(record.error for record in records if record.error)
        if failed.total() > _FAILED_SHARE * len(records):
            worst, times = failed.most_common(1)[0]
            yield f"{failed.total()} of {len(records)} requests failed; {times} with: {worst}"
        lengths = [record.completion_tokens for record in records if record.ok]
        uncounted = lengths.count(None)
        if uncounted:
            yield f"{uncounted} answers came without usage, so their tokens cannot be counted"
        wanted = workload.output_tokens
        wrong = [length for length in lengths if length not in (None, wanted)]
        # An answer that is too short would pass for a fast one.
        if wrong and workload.dialect == "vllm":
            yield f"{len(wrong)} answers are not of {wanted} tokens (one: {wrong[0]})"
        if not self.options.shared:
            yield from self.list_interference(records)
        if self.cpu > _BUSY:
            yield f"the client was the bottleneck: it used {100 * self.cpu:.0f} % of a core"
        # Cache hits that the declared state of the caches rules out. Requests with unique images
        # still share the tokens before the image, so these may hit the prefix cache.
        images = counters.get("image hits")
        prefix = counters.get("prefix hits")
        if workload.cache in ("unique", "off") and images:
            where = f"{workload.cache!r}, but {images:.0f} images came from a cache"
            yield f"cache state is {where}; start the servers again, or give another --seed"
        if workload.cache == "off" and prefix:
            yield f"cache state is 'off', but {prefix:.0f} prompt tokens came from the prefix cache"

    def list_interference(self, records: Sequence[Record]) -> Iterator[str]:
        """Every sign that other work disturbed a run, on the client's machine or on the server."""
        fix = "use an idle one, or accept it with --shared"
        # A closed loop has no schedule; there the lag of the client's idle greenlets is judged
        # instead.
        late, median = (
            self.summary.percentile(*key) for key in (("delay", 99), ("TTFT", 50))
        )
        name = "schedule delay"
        delay = late.value if late else 0.0
        if self.options.load.rate is None:
            name = "wake-up lag"
            delay = self.lag
        if median and delay > (bound := _DELAY_SHARE * median.value):
            yield (
                f"the client was the bottleneck: its {name} is {1000 * delay:.1f} ms at p99, above "
                f"{100 * _DELAY_SHARE:.0f} % of the median TTFT ({1000 * bound:.1f} ms); {fix}"
            )
        foreign = (self.counters or {}).get("finished", 0.0) - len(records)
        if foreign > max(_FOREIGN_REQUESTS * len(records), 2):
            yield f"the server also answered {foreign:.0f} requests of other clients; {fix}"

    def format(self) -> Iterator[str]:
        """Lines of the report: the verdict first, then the figures."""
        summary = self.summary
        yield f"{self.options.load.title}; {self.verdict}"
        busy = self.environment["load average"]
        cores = self.environment["cores"]
        if float(busy) > int(cores):
            load = f"load average {busy} on {cores} cores before the run"
            yield f"  warning: {load}: use an idle machine"
        rates = f"{summary.request_rate:.2f}"
        if self.options.load.rate is not None and summary.offered_rate is not None:
            rates = f"{summary.offered_rate:.2f} offered, {rates} achieved"
        yield f"  {summary.requests} requests counted, {summary.failed} failed: {rates} requests/s"
        for name, percentiles in summary.latencies.items():
            if percentiles and (name != "TTFAT" or summary.thinks):
                figures = [
                    f"p{level} {format_estimate(figure, 1000)}{summary.mark_few(level)}"
                    for level, figure in percentiles.items()
                ]
                label = "client delay" if name == "delay" else name
                yield f"  {label} ms: {'  '.join(figures)}"
        if summary.goodput is not None:
            good = format_estimate(summary.goodput, 100)
            yield f"  goodput: {good} % of requests met {self.options.describe_objective()}"
