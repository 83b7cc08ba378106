from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.dpp_torch import capped_greedy_map, condition


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


def test_anchors_fill_their_cells() -> None:
    actual = capped_greedy_map(
        torch.eye(4)[None],
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        2,
        anchors=torch.tensor([[0]]),
        eligible=torch.ones(1, 4, dtype=torch.bool),
        cells=torch.tensor([[3, 0, 0, 3]]),
        cap=1,
    )
    assert actual.tolist() == [[0, 2]]


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
