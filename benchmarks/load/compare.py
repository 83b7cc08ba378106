"""Two arms at one load: ratios of their percentiles on the same requests, and equal answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.common import StrictModel
from benchmarks.load.points import Point, Run, Values, e2e, tpot, ttft
from benchmarks.load.result import ratio, share
from benchmarks.load.schedule import Load
from vllm_autoprune.statistics import Estimate

FIGURES: Mapping[str, tuple[Values, int]] = {
    "TTFT p50": (ttft, 50),
    "TTFT p99": (ttft, 99),
    "TPOT p50": (tpot, 50),
    "E2E p50": (e2e, 50),
}


class Comparison(StrictModel):
    """One arm against the first at one load."""

    load: Load
    arm: str
    against: str
    figure: str
    ratio: Estimate | None
    """Below 1: less than the reference; None where a run of either is not valid."""
    by_pass: tuple[float, ...] = ()
    """The ratio of each pass alone: the interval does not cover differences between passes."""


class Agreement(StrictModel):
    """How often two arms gave exactly the same answer to the same request."""

    load: Load
    arm: str
    against: str
    same: Estimate | None


def compare_arms(points: Sequence[Point]) -> list[Comparison]:
    """Every arm against the first one, at every load that both have."""
    return [
        _comparison(point, reference, name)
        for point, reference in _pairs(points)
        for name in FIGURES
    ]


def compare_answers(points: Sequence[Point]) -> list[Agreement]:
    """Every arm against the first one; as a control, the first against itself, between passes."""
    agreements = []
    for point in points:
        if point.arm == points[0].arm and len(point.runs) > 1:
            same = _share_of_same_answers(point.runs[:1], point.runs[1:2])
            agreements.append(_agreement(point, f"{point.arm}, pass 1", same))
    for point, reference in _pairs(points):
        same = _share_of_same_answers(point.runs, reference.runs)
        agreements.append(_agreement(point, reference.arm, same))
    return agreements


def _pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    if not points:
        return []
    first = points[0].arm
    reference = {point.load: point for point in points if point.arm == first}
    return [
        (point, reference[point.load])
        for point in points
        if point.arm != first and point.load in reference
    ]


def _comparison(point: Point, reference: Point, name: str) -> Comparison:
    values, level = FIGURES[name]
    both = point.valid and reference.valid
    alone = [
        _ratio([mine], [other], values, level)
        for mine, other in zip(point.runs, reference.runs, strict=False)
    ]
    return Comparison(
        load=point.load,
        arm=point.arm,
        against=reference.arm,
        figure=name,
        ratio=_ratio(point.runs, reference.runs, values, level) if both else None,
        by_pass=tuple(one.value for one in alone if one) if both else (),
    )


def _ratio(
    over: Sequence[Run], under: Sequence[Run], values: Values, level: int
) -> Estimate | None:
    """Over the requests that both answered."""
    first = Point("", over[0].result.load, tuple(over)).by_request(values)
    second = Point("", under[0].result.load, tuple(under)).by_request(values)
    both = sorted(first.keys() & second.keys())
    return ratio([first[i] for i in both], [second[i] for i in both], level) if both else None


def _share_of_same_answers(first: Sequence[Run], second: Sequence[Run]) -> Estimate | None:
    first_answers = {record.index: record.text for run in first for record in run.counted}
    second_answers = {record.index: record.text for run in second for record in run.counted}
    both = sorted(first_answers.keys() & second_answers.keys())
    return share([first_answers[index] == second_answers[index] for index in both])


def _agreement(point: Point, against: str, same: Estimate | None) -> Agreement:
    return Agreement(load=point.load, arm=point.arm, against=against, same=same)
