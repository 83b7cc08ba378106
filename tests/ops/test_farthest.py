from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_autoprune.ops.greedy import (
    distance_to_kept,
    distance_to_others,
    farthest_points,
    weighted_farthest_points,
)


def on_a_line(places: list[float]) -> Tensor:
    """``(1, N, N)`` distances between points of a line."""
    at = torch.tensor(places)
    return (at[:, None] - at).abs()[None]


def none_taken(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.bool)


def test_by_hand_on_a_line() -> None:
    distance = on_a_line([0.0, 1.0, 4.0, 9.0, 10.0])
    taken = torch.tensor([[True, False, False, False, False]])
    picks = farthest_points(distance, 4, nearest=distance[:, 0], taken=taken)
    # From 0: 10 is farthest; then 4 (4 away from 0), then 1 and 9 are both 1 away.
    assert picks.tolist() == [[4, 2, 1, 3]]


def test_the_distances_to_earlier_choices_count() -> None:
    distance = on_a_line([0.0, 1.0, 2.0])
    picks = farthest_points(
        distance, 1, nearest=torch.tensor([[5.0, 9.0, 7.0]]), taken=none_taken(3)
    )
    assert picks.tolist() == [[1]]


def test_taken_tokens_are_never_picked() -> None:
    distance = on_a_line([0.0, 1.0, 100.0])
    taken = torch.tensor([[False, False, True]])
    picks = farthest_points(distance, 2, nearest=distance[:, 2], taken=taken)
    assert picks.tolist() == [[0, 1]]


def test_ties_go_to_the_lower_index() -> None:
    distance = torch.ones(1, 4, 4)
    assert farthest_points(distance, 4, nearest=torch.ones(1, 4), taken=none_taken(4)).tolist() == [
        [0, 1, 2, 3]
    ]


def test_rounding_breaks_no_tie() -> None:
    near, none = torch.tensor([[0.9, 1.0, 1.0000001, 1.0]]), none_taken(4)
    distance = torch.ones(1, 4, 4)
    assert farthest_points(distance, 1, nearest=near, taken=none).tolist() == [[1]]
    weighted = weighted_farthest_points(
        distance, torch.ones(1, 4), 1, nearest=near, taken=none, floor=0.0
    )
    assert weighted.tolist() == [[1]]


def test_count_zero_picks_nothing() -> None:
    picks = farthest_points(
        torch.ones(2, 3, 3), 0, nearest=torch.ones(2, 3), taken=none_taken(3).repeat(2, 1)
    )
    assert picks.shape == (2, 0) and picks.dtype == torch.int64


def test_no_tokens_have_no_farthest() -> None:
    empty = torch.ones(2, 0)
    picks = farthest_points(
        torch.ones(2, 0, 0), 0, nearest=empty, taken=torch.ones(2, 0, dtype=torch.bool)
    )
    assert picks.shape == (2, 0)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 14), data=st.data())
def test_each_pick_is_the_farthest_remaining_token(
    seed: int, size: int, data: st.DataObject
) -> None:
    source = torch.Generator().manual_seed(seed)
    distance = torch.rand(1, size, size, generator=source, dtype=torch.float64)
    nearest = torch.rand(1, size, generator=source, dtype=torch.float64)
    gone = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    count = data.draw(st.integers(0, size - len(gone)))
    taken = none_taken(size)
    taken[0, list(gone)] = True
    picks = farthest_points(distance, count, nearest=nearest, taken=taken)[0].tolist()

    left = {i: float(nearest[0, i]) for i in range(size) if i not in gone}
    for pick in picks:
        assert left[pick] == max(left.values())
        left = {i: min(d, float(distance[0, pick, i])) for i, d in left.items() if i != pick}


@given(bad=st.sets(st.integers(0, 7)), value=st.sampled_from([torch.nan, torch.inf]))
def test_non_finite_input_repeats_no_index(bad: set[int], value: float) -> None:
    distance = on_a_line([float(i * i) for i in range(8)])
    distance[:, list(bad)] = value
    picks = farthest_points(distance, 8, nearest=distance[:, 0], taken=none_taken(8))
    assert sorted(picks[0].tolist()) == list(range(8))


class TestWeighted:
    """Weight times distance to what is chosen."""

    LINE = on_a_line([0.0, 1.0, 4.0, 9.0, 10.0])

    def run(self, weight: list[float], count: int, **options: Tensor) -> list[int]:
        nearest = options.pop("nearest", torch.full((1, 5), torch.inf))
        taken = options.pop("taken", none_taken(5))
        picks: list[int] = weighted_farthest_points(
            self.LINE,
            torch.tensor([weight]),
            count,
            nearest=nearest,
            taken=taken,
            floor=1e-6,
            leading=options.get("leading"),
            fill=options.get("fill"),
        )[0].tolist()
        return picks

    def test_the_first_is_farthest_from_its_neighbour_whatever_its_weight(self) -> None:
        assert self.run([1.0, 1.0, 0.0, 1.0, 1.0], 1) == [2]

    def test_then_weight_times_distance_decides(self) -> None:
        # From 4: distances 4, 3, 5, 6 times the weights are 4, 0.3, 5, 0.6.
        assert self.run([1.0, 0.1, 1.0, 1.0, 0.1], 3) == [2, 3, 0]

    def test_without_weight_tokens_come_last_and_by_weight(self) -> None:
        assert self.run([0.0, 0.0, 1.0, 1.0, 0.0], 5) == [2, 3, 0, 1, 4]
        fill = torch.tensor([[0.1, 0.9, 0.0, 0.0, 0.5]])
        assert self.run([0.0, 0.0, 1.0, 1.0, 0.0], 5, fill=fill) == [2, 3, 1, 4, 0]

    def test_it_continues_from_what_is_chosen(self) -> None:
        taken = torch.tensor([[True, False, False, False, False]])
        nearest = distance_to_kept(self.LINE, taken)
        assert nearest.tolist() == [[0, 1, 4, 9, 10]]
        assert self.run([1.0] * 5, 2, nearest=nearest, taken=taken) == [4, 2]

    def test_forced_picks_come_first_and_condition_the_others(self) -> None:
        leading = torch.tensor([[4, -1, -1]])
        assert self.run([1.0] * 5, 3, leading=leading) == [4, 0, 2]

    def test_the_nearest_other_is_never_the_token_itself(self) -> None:
        assert distance_to_others(self.LINE).tolist() == [[1, 1, 3, 1, 1]]
