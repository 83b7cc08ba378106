"""The result of one run, as a file and in a few lines: verdict, figures, settings, machine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.metrics import ServerMetrics
from benchmarks.common.report import environment, format_estimate
from benchmarks.load.messages import RunFacts
from benchmarks.load.percentiles import LEVELS, Distribution
from benchmarks.load.priority import describe_priority
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import Workload
from benchmarks.load.summary import Summary
from benchmarks.load.verdict import Verdict

RESULT, RECORDS = "run.json", "records.jsonl"


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


def client_environment() -> dict[str, str]:
    """Versions, machine and scheduling priority of the client."""
    versions = {name: importlib.metadata.version(name) for name in ("locust", "gevent")}
    return {**environment(), **versions, "priority": describe_priority()}


def format_result(result: Result) -> Iterator[str]:
    """Verdict first, then figures, a line each."""
    summary, metrics = result.summary, result.metrics
    yield f"{result.label}: {result.load.describe()}; {result.verdict.describe()}"
    busy, cores = result.environment["load average"], result.environment["cores"]
    if float(busy) > int(cores):
        yield f"  warning: load average {busy} on {cores} cores before the run: use an idle machine"
    for note in result.verdict.notes:
        yield f"  note: {note}"
    yield (
        f"  {summary.requests} requests counted, {summary.failed} failed, in "
        f"{summary.seconds:.1f} s: {format_rates(result)} requests/s, "
        f"{summary.image_rate:.2f} images/s, "
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
            yield f"  {name:12s} ms: {format_percentiles(values)}"
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


def format_rates(result: Result) -> str:
    """Offered and achieved requests a second; a closed loop has no offered rate."""
    achieved, offered = result.summary.request_rate, result.summary.offered_rate
    if result.load.rate is None or offered is None:
        return f"{achieved:.2f}"
    return f"{offered:.2f} offered, {achieved:.2f} achieved"


def format_percentiles(values: Distribution) -> str:
    """Each with its interval, milliseconds; a dagger where it rests on too few requests."""
    return "  ".join(
        f"p{q.level} {format_estimate(q.estimate, 1000)}{'' if q.enough else '†'}"
        for level in LEVELS
        for q in values.quantiles
        if q.level == level
    )


def format_hits(hits: float | None, queries: float | None) -> str:
    """Such as "12 of 40"; "not counted" where the server does not report it."""
    return "not counted" if hits is None or queries is None else f"{hits:.0f} of {queries:.0f}"
