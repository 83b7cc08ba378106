"""Several objectives at once: a candidate's point, and the points that no other beats.

Knows nothing about how anything is measured. On every axis more is better; latency is a negative
number of milliseconds for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offline_search.answers import Floats, by_category
from offline_search.examples import Example
from offline_search.settings import Settings

Point = Mapping[str, float]
"""A value on each axis."""


def axes(
    settings: Settings,
    examples: Sequence[Example],
    values: Mapping[int, Floats],
    objective: float,
    latency: float | None,
) -> dict[str, float]:
    """The point of a candidate; none where the search has one objective.

    values: relative log-probabilities ``(M,)`` by budget; latency: milliseconds of one selection.
    """
    point: dict[str, float] = {}
    if not settings.several:
        return point
    if "quality" in settings.objectives:
        point["quality"] = objective
    if "budgets" in settings.objectives:
        point |= {f"K={budget}": round(float(each.mean()), 6) for budget, each in values.items()}
    if "tasks" in settings.objectives:
        mean: Floats = sum(values.values()) / len(values)  # type: ignore[assignment]
        point |= by_category(examples, mean)
    if latency is not None:
        point["latency"] = -latency
    return point


def dominates(one: Point, other: Point) -> bool:
    """Whether a point is nowhere worse and somewhere better."""
    return all(one[axis] >= other[axis] for axis in other) and any(
        one[axis] > other[axis] for axis in other
    )


def depths(points: Sequence[Point]) -> list[int]:
    """0 for points of the Pareto front, 1 for those of the front without them, and so on."""
    found = [-1] * len(points)
    left = list(range(len(points)))
    depth = 0
    while left:
        front = [i for i in left if not any(dominates(points[j], points[i]) for j in left)]
        for place in front:
            found[place] = depth
        left = [place for place in left if found[place] < 0]
        depth += 1
    return found
