"""Two arms at one load: ratios of percentiles, request by request the same; and what they said.

Knows nothing about servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.load.plain import Plain
from benchmarks.load.points import Point, Run, Values, e2e, tpot, ttft
from benchmarks.load.statistics import Estimate, ratio, share

FIGURES: Mapping[str, tuple[Values, int]] = {
    "TTFT p50": (ttft, 50),
    "TTFT p99": (ttft, 99),
    "TPOT p50": (tpot, 50),
    "E2E p50": (e2e, 50),
}


class Comparison(Plain):
    """One arm against the first at one load."""

    load: str
    arm: str
    against: str
    figure: str
    ratio: Estimate | None
    """Below 1: less than the other; None where a run of either is not valid."""
    by_pass: tuple[float, ...] = ()
    """The same of each pass alone: how far passes scatter, which the interval cannot know."""


class Agreement(Plain):
    """How often two arms gave the same answer to the same request, to the last letter."""

    load: str
    arm: str
    against: str
    same: Estimate | None


def comparisons(points: Sequence[Point]) -> list[Comparison]:
    """Every arm against the first, at every load that both have."""
    return [
        _comparison(point, reference, name)
        for point, reference in _pairs(points)
        for name in FIGURES
    ]


def agreements(points: Sequence[Point]) -> list[Agreement]:
    """Every arm against the first; and the first against itself, pass by pass, as a control."""
    found = []
    for point in points:
        if point.arm == points[0].arm and len(point.runs) > 1:
            same = _same(point.runs[:1], point.runs[1:2])
            found.append(_agreement(point, f"{point.arm}, pass 1", same))
    for point, reference in _pairs(points):
        found.append(_agreement(point, reference.arm, _same(point.runs, reference.runs)))
    return found


def _pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    if not points:
        return []
    first = points[0].arm
    reference = {point.load.label: point for point in points if point.arm == first}
    return [
        (point, reference[point.load.label])
        for point in points
        if point.arm != first and point.load.label in reference
    ]


def _comparison(point: Point, reference: Point, name: str) -> Comparison:
    values, level = FIGURES[name]
    both = point.valid and reference.valid
    alone = [
        _ratio([mine], [other], values, level)
        for mine, other in zip(point.runs, reference.runs, strict=False)
    ]
    return Comparison(
        load=point.load.label,
        arm=point.arm,
        against=reference.arm,
        figure=name,
        ratio=_ratio(point.runs, reference.runs, values, level) if both else None,
        by_pass=tuple(found.value for found in alone if found) if both else (),
    )


def _ratio(
    over: Sequence[Run], under: Sequence[Run], values: Values, level: int
) -> Estimate | None:
    """Only requests that both answered: the same ones on either side of the ratio."""
    first = Point("", over[0].result.load, tuple(over)).by_request(values)
    second = Point("", under[0].result.load, tuple(under)).by_request(values)
    both = sorted(first.keys() & second.keys())
    return ratio([first[i] for i in both], [second[i] for i in both], level) if both else None


def _same(first: Sequence[Run], second: Sequence[Run]) -> Estimate | None:
    told = {record.index: record.text for run in first for record in run.counted}
    other = {record.index: record.text for run in second for record in run.counted}
    both = sorted(told.keys() & other.keys())
    return share([told[index] == other[index] for index in both])


def _agreement(point: Point, against: str, same: Estimate | None) -> Agreement:
    return Agreement(load=point.load.label, arm=point.arm, against=against, same=same)
