from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import covered_by, greedy_coverage


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


def test_each_pick_adds_most_to_what_is_covered() -> None:
    # Sums 1.0, 0.9, 0.6; after the first, 0.4 and 0.6 are left.
    assert coverage(DEGREES, 3) == [0, 2, 1]


def test_rounding_breaks_no_tie() -> None:
    assert coverage(torch.tensor([[0.1, 0.2], [0.3, 0.6], [0.6000001, 0.3]]), 1) == [1]


def test_weights_scale_the_gains() -> None:
    assert coverage(DEGREES, 3, [0.1, 1.0, 1.0]) == [1, 2, 0]


def test_negative_degrees_cover_nothing() -> None:
    assert coverage(torch.tensor([[-3.0, 0.1], [0.0, 0.2]]), 2) == [1, 0]


def test_what_adds_nothing_comes_by_weight() -> None:
    same = torch.ones(4, 2)
    assert coverage(same, 4, [0.1, 0.9, 0.3, 0.9]) == [1, 3, 2, 0]
    assert coverage(same, 4) == [0, 1, 2, 3]


def test_taken_candidates_are_left_out_and_their_coverage_counts() -> None:
    taken = torch.tensor([[True, False, False]])
    covered = covered_by(DEGREES[None], taken)
    assert covered.tolist() == [[0.5, 0.5, 0.0]]
    picks = greedy_coverage(
        DEGREES[None], torch.ones(1, 3), 2, covered=covered, taken=taken, floor=1e-9
    )
    assert picks.tolist() == [[2, 1]]


def test_nothing_kept_covers_nothing() -> None:
    kept = torch.zeros(1, 3, dtype=torch.bool)
    assert covered_by(-DEGREES[None], kept).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_images_of_a_batch_are_independent(count: int) -> None:
    degrees = torch.rand(3, 6, 9, generator=torch.Generator().manual_seed(1))
    weight, covered = torch.rand(3, 6), torch.zeros(3, 9)
    taken = torch.zeros(3, 6, dtype=torch.bool)
    together = greedy_coverage(degrees, weight, count, covered=covered, taken=taken, floor=0.0)
    assert together.shape == (3, count)
    for i in range(3):
        one = slice(i, i + 1)
        alone = greedy_coverage(
            degrees[one], weight[one], count, covered=covered[one], taken=taken[one], floor=0.0
        )
        assert torch.equal(together[one], alone)
