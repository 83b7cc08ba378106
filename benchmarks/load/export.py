"""Results for other programs: CSV of points, and a summary as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.load.answer import Answer
from benchmarks.load.compare import compare_arms
from benchmarks.load.points import Point, Values, e2e, itl, tpot, ttft
from benchmarks.load.result import LEVELS, write_csv
from vllm_autoprune.statistics import Estimate

POINTS_CSV = "points.csv"
TIMES: Mapping[str, Values] = {"ttft": ttft, "itl": itl, "tpot": tpot, "e2e": e2e}

Value = str | float | int | bool | None


def write_points_csv(points: Sequence[Point], path: Path) -> None:
    """One line for each arm at each load, times in milliseconds; raises OSError."""
    write_csv(path, [_describe_point(point) for point in points])


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
