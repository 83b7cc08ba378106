"""Hand-written records, results and points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.client import Record
from benchmarks.load.report import Point, Run
from benchmarks.load.result import Result, Summary
from benchmarks.load.settings import Load, RunOptions, SendingOptions, Workload

SLO = SendingOptions(slo_ttft=500)


def record(
    index: int,
    *,
    scheduled: float = 0.0,
    ttft: float = 0.2,
    gap: float = 0.05,
    tokens: int = 4,
    error: str | None = None,
    **fields: Any,
) -> Record:
    """An answered request with even gaps, or a failed one, with other fields as given."""
    deltas = tuple(scheduled + ttft + gap * number for number in range(tokens))
    fields = {"started": scheduled, "prompt_tokens": 600, **fields}
    if error is None:
        fields |= {"deltas": deltas, "completion_tokens": tokens}
    return Record(
        index=index, scheduled=scheduled, done=deltas[-1], error=error, **fields
    )


def result(records: Sequence[Record], load: Load, **changes: object) -> Result:
    """A run of these records by a calm client, with other fields as given."""
    rate = load.rate or 0.0
    users = load.users
    options = RunOptions(
        host="http://x", workload=Path(), rate=rate, users=users, slo_ttft=500
    )
    good = Result(
        workload=Workload(model="mock", requests=len(records) or 1, output_tokens=4),
        options=options,
        summary=Summary.of([records], SLO),
        counters={"image hits": 0, "prefix hits": 0},
        cpu=0.2,
        lag=0.0005,
        environment={"load average": "0.10", "cores": "2"},
    )
    return good.model_copy(update=changes)


def point(
    arm: str,
    load: Load,
    passes: Sequence[Sequence[float]],
    *,
    every: float = 0.1,
    valid: bool = True,
    thoughts: int = 0,
) -> Point:
    """An arm whose passes have these times to the first token, one request ``every`` seconds."""
    reasons = () if valid else ("the client was the bottleneck",)
    runs = []
    for number, times in enumerate(passes):
        records = [
            record(i, scheduled=i * every, ttft=ttft, thoughts=thoughts)
            for i, ttft in enumerate(times)
        ]
        folder = f"runs/{number}-{arm}/{load.label}"
        runs.append(
            Run(arm, number, folder, result(records, load, reasons=reasons), records)
        )
    return Point(arm, load, tuple(runs))
