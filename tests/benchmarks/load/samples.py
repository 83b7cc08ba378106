"""Hand-written records, results and points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.common.client import Phase, Record, ServerMetrics
from benchmarks.load.compare import Point, Run
from benchmarks.load.result import ClientFacts, Result, RunFacts, Verdict, summarize
from benchmarks.load.settings import Load, Slo, Workload

WORKLOAD = Workload(model="mock", requests=8, warm_up=2, output_tokens=4, sides={64: 1})
SLO, VALID, UNREAD = Slo(ttft=0.5), Verdict(), ServerMetrics()
CALM = ClientFacts(cpu=0.2, lag_p50=0.0001, lag_p99=0.0005)


def record(
    index: int,
    *,
    scheduled: float = 0.0,
    ttft: float = 0.2,
    gap: float = 0.05,
    delay: float = 0.0,
    tokens: int = 4,
    error: str | None = None,
    phase: Phase = "measured",
    text: str = "yes",
) -> Record:
    """An answered request with even gaps, or a failed one."""
    deltas = tuple(scheduled + ttft + gap * number for number in range(tokens))
    return Record(
        index=index,
        phase=phase,
        scheduled=scheduled,
        started=scheduled + delay,
        deltas=() if error else deltas,
        done=deltas[-1],
        status=200,
        prompt_tokens=600,
        completion_tokens=None if error else tokens,
        text=text,
        error=error,
    )


def result(
    records: Sequence[Record],
    load: Load,
    *,
    slo: Slo = SLO,
    verdict: Verdict = VALID,
    workload: Workload = WORKLOAD,
    metrics: ServerMetrics = UNREAD,
    facts: RunFacts | None = None,
) -> Result:
    """A run of these records."""
    return Result(
        label=load.label,
        url="http://127.0.0.1:1",
        began="2026-01-01T00:00:00+00:00",
        workload=workload,
        workload_digest="0123456789abcdef",
        load=load,
        slo=slo,
        verdict=verdict,
        summary=summarize([records], slo),
        metrics=metrics,
        facts=facts or RunFacts(planned=len(records), clients=(CALM,)),
        environment={"load average": "0.10", "cores": "2"},
        command=("locust",),
    )


def point(
    arm: str,
    load: Load,
    ttfts: Sequence[Sequence[float]],
    *,
    every: float = 0.1,
    valid: bool = True,
) -> Point:
    """An arm whose passes have these times to the first token, one request ``every`` seconds."""
    verdict = VALID if valid else Verdict(reasons=("the client was the bottleneck",))
    runs = []
    for number, times in enumerate(ttfts):
        records = [record(i, scheduled=i * every, ttft=ttft) for i, ttft in enumerate(times)]
        folder = f"runs/{number}-{arm}/{load.label}"
        runs.append(
            Run(arm, number, result(records, load, verdict=verdict), tuple(records), folder)
        )
    return Point(arm, load, tuple(runs))


def write_images(folder: Path, count: int) -> None:
    """Small images that differ, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 2 * number, 0)).save(folder / f"{number:03}.png")
