"""Greedy MAP: its definition, anchors, conditioning and caps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.dpp_torch import capped_greedy_map, condition
from vllm_autoprune.ops.rowwise import TIE
from vllm_autoprune.ops.similarity import cosines


def kernel(seed: int, batch: int, size: int, rank: int = 24) -> tuple[Tensor, Tensor]:
    """Cosines of random directions, and qualities between 0.2 and 1."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, rank, generator=source)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    return unit @ unit.transpose(1, 2), 0.2 + 0.8 * torch.rand(batch, size, generator=source)


def by_determinant(
    similarity: Tensor, quality: Tensor, count: int, start: list[int], allowed: list[int]
) -> list[int]:
    """Greedy MAP from the definition: every determinant is computed, in float64.

    The diagonal of cosines is 1, and the lowest index within the tolerance is picked.
    """
    exact = similarity.double().fill_diagonal_(1)
    matrix = quality[:, None].double() * exact * quality.double()
    picks = list(start)
    while len(picks) < count:
        rest = [j for j in allowed if j not in picks]
        gains = [float(torch.det(matrix[[*picks, j]][:, [*picks, j]])) for j in rest]
        bound = min(max(gains), max(gains) * (1 - TIE))
        picks.append(next(j for j, gain in zip(rest, gains, strict=True) if gain >= bound))
    return picks


@given(seed=st.integers(0, 10_000), size=st.integers(2, 12), data=st.data())
def test_picks_are_those_with_the_largest_determinant(
    seed: int, size: int, data: st.DataObject
) -> None:
    similarity, quality = kernel(seed, 2, size)
    count = data.draw(st.integers(1, size))
    picks = greedy_map(similarity, quality, count)
    assert picks.tolist() == [
        by_determinant(s, q, count, [], list(range(size)))
        for s, q in zip(similarity, quality, strict=True)
    ]


@given(seed=st.integers(0, 10_000), data=st.data())
def test_anchors_come_first_and_the_rest_is_conditioned_on_them(
    seed: int, data: st.DataObject
) -> None:
    similarity, quality = kernel(seed, 1, 10)
    order = data.draw(st.permutations(range(10)))
    forced = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(forced, 7))
    anchors, open_to = order[:forced], sorted(order[:8])
    eligible = torch.zeros(1, 10, dtype=torch.bool)
    eligible[0, open_to] = True
    picks = greedy_map(
        similarity, quality, count, anchors=torch.tensor([anchors]), eligible=eligible
    )
    expected = by_determinant(similarity[0], quality[0], count, anchors, open_to)
    assert picks[0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_pick_does_not_depend_on_how_the_diagonal_is_rounded(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(8)
    rows = torch.randn(4, 96, 512, generator=source).exp().to(dtype)
    similarity, quality = cosines(rows, rows.norm(dim=-1, keepdim=True)), torch.ones(4, 96)
    assert not bool((similarity.diagonal(dim1=1, dim2=2).argmax(dim=1) == 0).all())
    every = torch.ones(4, 96, dtype=torch.bool)
    capped = capped_greedy_map(
        *(similarity, quality, 2),
        anchors=torch.empty(4, 0, dtype=torch.int64),
        eligible=every,
        cells=every.long(),
        cap=96,
    )
    assert capped[:, 0].tolist() == greedy_map(similarity, quality, 2)[:, 0].tolist() == [0] * 4
    eligible = every.index_fill(1, torch.tensor([0, 1, 2]), False)
    assert greedy_map(similarity, quality, 2, eligible=eligible)[:, 0].tolist() == [3] * 4


def test_an_exhausted_kernel_is_filled_up_by_quality_among_the_eligible() -> None:
    quality = torch.tensor([[0.1, 0.5, 0.9, 0.5, 0.3]])
    eligible = torch.tensor([[True, True, True, True, False]])
    picks = greedy_map(torch.ones(1, 5, 5), quality, 4, eligible=eligible)
    assert picks.tolist() == [[2, 1, 3, 0]]


@pytest.mark.parametrize("count", [1, 5, 9])
def test_nan_repeats_no_index_and_stays_in_its_own_row(count: int) -> None:
    similarity, quality = kernel(3, 3, 9)
    clean = greedy_map(similarity, quality, count)
    similarity[1], quality[2, 4] = torch.nan, torch.nan
    picks = greedy_map(similarity, quality, count)
    assert torch.equal(picks[0], clean[0])
    assert all(row.unique().numel() == count for row in picks)


@given(seed=st.integers(0, 10_000), data=st.data())
def test_conditioning_on_tokens_gives_the_picks_that_follow_them_as_anchors(
    seed: int, data: st.DataObject
) -> None:
    similarity, quality = kernel(seed, 3, 40)
    forced, count = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(range(40)))
    anchors = torch.tensor([order[:forced], order[1 : forced + 1], order[2 : forced + 2]])
    anchored = greedy_map(similarity, quality, forced + count, anchors=anchors)
    conditioned = condition(similarity, anchors)
    picks = greedy_map(similarity, quality, count, conditioned=conditioned)
    assert picks.tolist() == anchored[:, forced:].tolist()


def test_a_conditioned_kernel_is_the_same_alone_and_in_a_batch() -> None:
    similarity, _ = kernel(5, 4, 64, rank=48)
    given_tokens = torch.arange(20).expand(4, -1)
    together = condition(similarity, given_tokens)
    alone = condition(similarity[2:3], given_tokens[2:3])
    assert torch.equal(together.factors[2:3], alone.factors)
    assert torch.equal(together.residual[2:3], alone.residual)


def test_tokens_that_are_not_valid_do_not_condition() -> None:
    similarity, quality = kernel(6, 2, 20)
    given_tokens = torch.tensor([[3, 7, 9], [3, 7, 9]])
    some = condition(similarity, given_tokens, torch.tensor([[True, False, True]] * 2))
    fewer = condition(similarity, given_tokens[:, [0, 2]])
    assert torch.equal(some.residual, fewer.residual)
    picks = greedy_map(similarity, quality, 17, conditioned=some)
    assert 7 in picks[0].tolist()


def test_given_tokens_are_not_picked_again_when_the_kernel_is_exhausted() -> None:
    conditioned = condition(torch.ones(1, 5, 5), torch.tensor([[2, 0]]))
    quality = torch.tensor([[0.1, 0.5, 0.9, 0.5, 0.3]])
    picks = greedy_map(torch.ones(1, 5, 5), quality, 3, conditioned=conditioned)
    assert picks.tolist() == [[1, 3, 4]]


def similarity(seed: int, batch: int = 2, tokens: int = 20, width: int = 24) -> torch.Tensor:
    rows = torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(rows, dim=2)
    return unit @ unit.transpose(1, 2)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 20), forced=st.integers(0, 4))
def test_cap_that_never_binds_equals_greedy_map(seed: int, count: int, forced: int) -> None:
    kernel, source = similarity(seed), torch.Generator().manual_seed(seed)
    quality = torch.rand(2, 20, generator=source) + 0.1
    anchors = torch.rand(2, 20, generator=source).argsort(dim=1)[:, : min(forced, count)]
    every = torch.ones(2, 20, dtype=torch.bool)
    actual = capped_greedy_map(
        kernel, quality, count, anchors=anchors, eligible=every, cells=every.long() * 0, cap=20
    )
    expected = greedy_map(kernel, quality, count, anchors=anchors, eligible=every)
    assert torch.equal(actual, expected)


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 5), cells=st.integers(4, 8))
def test_no_cell_gets_more_than_the_cap_while_another_has_room(
    seed: int, cap: int, cells: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(cells, (2, 20), generator=source)
    eligible = torch.rand(2, 20, generator=source) < 0.8
    eligible[:, :4] = True
    for image in range(2):
        room = sum(
            min(cap, int((eligible[image] & (labels[image] == c)).sum())) for c in range(cells)
        )
        actual = capped_greedy_map(
            similarity(seed)[image : image + 1],
            torch.ones(1, 20),
            room,
            anchors=torch.empty(1, 0, dtype=torch.int64),
            eligible=eligible[image : image + 1],
            cells=labels[image : image + 1],
            cap=cap,
        )[0]
        assert len(set(actual.tolist())) == room and bool(eligible[image][actual].all())
        assert int(labels[image][actual].bincount().max()) <= cap


def test_by_hand() -> None:
    # All tokens are unlike each other, so quality decides: 3, 2, 1, 0, and two share a cell.
    actual = capped_greedy_map(
        torch.eye(4)[None],
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        3,
        anchors=torch.empty(1, 0, dtype=torch.int64),
        eligible=torch.ones(1, 4, dtype=torch.bool),
        cells=torch.tensor([[0, 1, 2, 2]]),
        cap=1,
    )
    assert actual.tolist() == [[3, 1, 0]]


def test_cap_is_ignored_if_all_cells_are_full() -> None:
    actual = capped_greedy_map(
        torch.eye(4)[None],
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        4,
        anchors=torch.empty(1, 0, dtype=torch.int64),
        eligible=torch.ones(1, 4, dtype=torch.bool),
        cells=torch.zeros(1, 4, dtype=torch.int64),
        cap=1,
    )
    assert actual.tolist() == [[3, 2, 1, 0]]


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 5), forced=st.integers(0, 4))
def test_conditioned_on_tokens_it_picks_what_follows_them_as_anchors(
    seed: int, cap: int, forced: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    kernel, labels = similarity(seed), torch.randint(5, (2, 20), generator=source)
    quality = torch.rand(2, 20, generator=source) + 0.1
    order = torch.rand(2, 20, generator=source).argsort(dim=1)
    core, first = order[:, :6], order[:, 6 : 6 + forced]
    eligible = (torch.rand(2, 20, generator=source) < 0.8).scatter(1, order[:, 6:16], True)
    eligible = eligible.scatter(1, core, False)
    anchored = capped_greedy_map(
        *(kernel, quality, 14),
        anchors=torch.cat([core, first], dim=1),
        eligible=eligible,
        cells=labels,
        cap=cap,
    )
    conditioned = capped_greedy_map(
        *(kernel, quality, 8),
        anchors=first,
        eligible=eligible,
        cells=labels,
        cap=cap,
        conditioned=condition(kernel, core),
    )
    assert torch.equal(conditioned, anchored[:, 6:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_repeats_no_index(value: float) -> None:
    kernel, quality = similarity(1), torch.rand(2, 20)
    kernel[0, 3] = kernel[0, :, 3] = value
    quality[0, 5] = value
    every = torch.ones(2, 20, dtype=torch.bool)
    given_ = {"eligible": every, "cells": torch.arange(20).expand(2, -1) % 5, "cap": 3}
    none = torch.empty(2, 0, dtype=torch.int64)
    actual = capped_greedy_map(kernel, quality, 12, anchors=none, **given_)  # type: ignore[arg-type]
    assert [len(set(row)) for row in actual.tolist()] == [12, 12]
