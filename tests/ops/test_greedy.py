"""Farthest points, coverage, and what fills up the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import (
    distance_to_kept,
    distance_to_others,
    farthest_points,
    fill_by_weight,
    greedy_coverage,
    weighted_farthest_points,
)


def on_a_line(places: list[float]) -> Tensor:
    """``(1, N, N)`` distances between points of a line."""
    at = torch.tensor(places)
    return (at[:, None] - at).abs()[None]


def none_taken(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.bool)


def test_rounding_breaks_no_tie() -> None:
    near, none = torch.tensor([[0.9, 1.0, 1.0000001, 1.0]]), none_taken(4)
    distance = torch.ones(1, 4, 4)
    assert farthest_points(distance, 1, nearest=near, taken=none).tolist() == [[1]]
    weighted = weighted_farthest_points(
        distance, torch.ones(1, 4), 1, nearest=near, taken=none, floor=0.0
    )
    assert weighted.tolist() == [[1]]
    assert coverage(torch.tensor([[0.1, 0.2], [0.3, 0.6], [0.6000001, 0.3]]), 1) == [1]


LINE = on_a_line([0.0, 1.0, 4.0, 9.0, 10.0])
ALL, FIRST = [1.0] * 5, torch.tensor([[True, False, False, False, False]])


@pytest.mark.parametrize(
    ("weight", "count", "options", "picks"),
    [
        # The first is farthest from its neighbour, whatever its weight.
        ([1.0, 1.0, 0.0, 1.0, 1.0], 1, {}, [2]),
        # From 4: distances 4, 3, 5, 6 times the weights are 4, 0.3, 5, 0.6.
        ([1.0, 0.1, 1.0, 1.0, 0.1], 3, {}, [2, 3, 0]),
        # Without weight tokens come last, and by weight or what fills.
        ([0.0, 0.0, 1.0, 1.0, 0.0], 5, {}, [2, 3, 0, 1, 4]),
        ([0.0, 0.0, 1.0, 1.0, 0.0], 5, {"fill": torch.tensor([[0.1, 0.9, 0.0, 0.0, 0.5]])},
         [2, 3, 1, 4, 0]),
        # It continues from what is chosen, and forced picks condition the others.
        (ALL, 2, {"nearest": distance_to_kept(LINE, FIRST), "taken": FIRST}, [4, 2]),
        (ALL, 3, {"leading": torch.tensor([[4, -1, -1]])}, [4, 0, 2]),
    ],
)  # fmt: skip
def test_weight_times_distance_to_what_is_chosen(
    weight: list[float], count: int, options: dict[str, Tensor], picks: list[int]
) -> None:
    start = {"nearest": torch.full((1, 5), torch.inf), "taken": none_taken(5), **options}
    chosen = weighted_farthest_points(LINE, torch.tensor([weight]), count, floor=1e-6, **start)
    assert chosen.tolist() == [picks]
    assert distance_to_kept(LINE, FIRST).tolist() == [[0, 1, 4, 9, 10]]
    assert distance_to_others(LINE).tolist() == [[1, 1, 3, 1, 1]]  # never the token itself


WEIGHT = [0.2, 0.9, 0.5, 0.1, 0.5]
SOME = torch.tensor([[True, False, False, True, True]])
NAN = torch.nan


@pytest.mark.parametrize(
    ("gains", "weight", "eligible", "floor", "picks"),
    [
        # Picks with a gain stay and the rest comes by weight.
        ([2.0, 1.0, 0.5], WEIGHT, None, 0.1, [3, 1, 0]),
        ([2.0, 1.0, 0.5], WEIGHT, None, 0.7, [3, 1, 2]),
        ([2.0, 1.0, 0.5], WEIGHT, None, 5.0, [1, 2, 4]),
        ([0.0, 0.0, 0.0], WEIGHT, SOME, 0.0, [4, 0, 3]),
        # NaN is no gain, and a NaN weight comes first.
        ([1.0, NAN, NAN], [NAN, 0.9, -torch.inf, 0.1, 0.5], None, 0.0, [3, 0, 1]),
    ],
)
def test_what_fills_up_by_weight(
    gains: list[float], weight: list[float], eligible: Tensor | None, floor: float, picks: list[int]
) -> None:
    known = torch.tensor([[3, 1, 0]])
    filled = fill_by_weight(known, torch.tensor([gains]), torch.tensor([weight]), eligible, floor)
    assert filled.tolist() == [picks]


def coverage(degrees: Tensor, count: int, weight: list[float] | None = None) -> list[int]:
    """Picks of one image, from nothing covered and nothing taken."""
    size, rows = degrees.shape
    weights = torch.ones(1, size) if weight is None else torch.tensor([weight])
    picks: list[int] = greedy_coverage(
        degrees[None],
        weights,
        count,
        covered=torch.zeros(1, rows),
        taken=torch.zeros(1, size, dtype=torch.bool),
        floor=1e-9,
        scale=weight is not None,
    )[0].tolist()
    return picks


DEGREES = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.6]])
"""Candidates that cover two rows half, one row well, and the third row."""


ALIKE = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("degrees", "weight", "picks"),
    [
        # Sums 1.0, 0.9, 0.6; after the first, 0.4 and 0.6 are left.
        (DEGREES, None, [0, 2, 1]),
        (DEGREES, [0.1, 1.0, 1.0], [1, 2, 0]),
        # Negative degrees cover nothing, and what adds nothing comes by weight.
        (torch.tensor([[-3.0, 0.1], [0.0, 0.2]]), None, [1, 0]),
        (ALIKE, [0.1, 0.9, 0.3, 0.9], [1, 3, 2, 0]),
        (ALIKE, None, [0, 1, 2, 3]),
    ],
)
def test_each_pick_adds_most_to_what_is_covered(
    degrees: Tensor, weight: list[float] | None, picks: list[int]
) -> None:
    assert coverage(degrees, len(degrees), weight) == picks
