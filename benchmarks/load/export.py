"""Results for other programs: CSV of requests and of points, and a summary as JSON."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.common.request_record import Record
from benchmarks.load.answer import Answer
from benchmarks.load.compare import compare_arms
from benchmarks.load.percentiles import LEVELS
from benchmarks.load.points import Point, Values, e2e, itl, tpot, ttft
from vllm_autoprune.statistics import Estimate

REQUESTS_CSV, POINTS_CSV = "requests.csv", "points.csv"
TIMES: Mapping[str, Values] = {"ttft": ttft, "itl": itl, "tpot": tpot, "e2e": e2e}

Value = str | float | int | bool | None


def write_requests_csv(records: Iterable[Record], path: Path) -> None:
    """One line a request, times in seconds; raises OSError."""
    _write(path, [_describe_request(record) for record in records])


def write_points_csv(points: Sequence[Point], path: Path) -> None:
    """One line for each arm at each load, times in milliseconds; raises OSError."""
    _write(path, [_describe_point(point) for point in points])


def summarize_experiment(
    points: Sequence[Point], answer: Answer, report: Path
) -> dict[str, object]:
    """Answer, points and comparisons, as ``--json`` prints them."""
    comparisons = [one.model_dump(mode="json") for one in compare_arms(points)]
    return {
        "answer": answer.sentence,
        "tone": answer.tone,
        "limits": list(answer.limits),
        "report": str(report),
        "points": [_describe_point(point) for point in points],
        "comparisons": comparisons,
    }


def _describe_request(record: Record) -> dict[str, Value]:
    return {
        "index": record.index,
        "phase": record.phase,
        "worker": record.worker,
        "scheduled": record.scheduled,
        "started": record.started,
        "ttft": record.ttft if record.ok else None,
        "tpot": record.tpot if record.ok else None,
        "e2e": record.e2e if record.ok else None,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "images": record.images,
        "body_bytes": record.body_bytes,
        "error": record.error,
    }


def _describe_point(point: Point) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "load": point.load.label,
        "arm": point.arm,
        "valid": point.valid,
        "passes": len(point.runs),
        "requests": point.requests,
        "offered_rate": point.offered if point.load.rate is not None else None,
        "achieved_rate": point.completed,
    }
    fields |= _describe_estimate("goodput", point.goodput)
    for name, values in TIMES.items():
        times = point.distribution(values)
        for level in LEVELS:
            own = times.at(level) if times else None
            fields |= _describe_estimate(f"{name}_p{level}_ms", own, 1000)
    return fields


def _describe_estimate(name: str, own: Estimate | None, unit: float = 1.0) -> dict[str, Value]:
    if own is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    value, low, high = (round(unit * each, 4) for each in dataclasses.astuple(own))
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _write(path: Path, rows: Sequence[Mapping[str, Value]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
