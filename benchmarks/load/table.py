"""A run as a few lines of text.

Knows nothing about files or pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.load.result import Result
from benchmarks.load.statistics import LEVELS, Distribution, Estimate


def lines(result: Result) -> Iterator[str]:
    """Verdict first, then figures."""
    summary, metrics = result.summary, result.metrics
    yield f"{result.label}: {result.load.spoken()}; {result.verdict.spoken()}"
    for note in result.verdict.notes:
        yield f"  note: {note}"
    yield (
        f"  {summary.requests} requests counted, {summary.failed} failed, in "
        f"{summary.seconds:.1f} s: "
        f"{summary.request_rate:.2f} requests/s, {summary.image_rate:.2f} images/s, "
        f"{summary.output_token_rate:.1f} output tokens/s"
    )
    for name, found in (
        ("TTFT", summary.ttft),
        ("ITL", summary.itl),
        ("TPOT", summary.tpot),
        ("E2E", summary.e2e),
        ("client delay", summary.delay),
    ):
        if found is not None:
            yield f"  {name:12s} ms: {percentiles(found)}"
    if summary.goodput is not None:
        told = estimate(summary.goodput, 100, 1)
        yield f"  goodput: {told} % of requests kept {result.slo.spoken()}"
    before, after = metrics.visual_tokens_before, metrics.visual_tokens_after
    if before is not None and after is not None:
        yield f"  visual tokens: {before:.0f} before, {after:.0f} after pruning"
    if metrics.peak_kv_use is not None:
        yield f"  KV cache: {100 * metrics.peak_kv_use:.1f} % used at the peak"
    yield (
        f"  caches: {hits(metrics.mm_cache_hits, metrics.mm_cache_queries)} images, "
        f"{hits(metrics.prefix_cache_hits, metrics.prefix_cache_queries)} prompt tokens"
    )


def percentiles(found: Distribution) -> str:
    """Each with its interval, milliseconds; a dagger where too few requests stand behind it."""
    return "  ".join(
        f"p{q.level} {estimate(q.estimate)}{'' if q.enough else '†'}"
        for level in LEVELS
        for q in found.quantiles
        if q.level == level
    )


def estimate(of: Estimate, unit: float = 1000.0, digits: int = 1) -> str:
    """A figure with its interval."""
    value, low, high = (f"{unit * x:.{digits}f}" for x in (of.value, of.low, of.high))
    return f"{value} ({low}–{high})"


def hits(found: float | None, queries: float | None) -> str:
    """Such as "12 of 40"; a server that does not count says nothing about hits."""
    return "not counted" if found is None or queries is None else f"{found:.0f} of {queries:.0f}"
