from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_autoprune.ops.farthest import farthest_points


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
