"""Greedy MAP: its definition, anchors, conditioning and caps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.kernel_inputs import draw_kernel
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.greedy import (
    Cap,
    Conditioned,
    capped_greedy_map,
)
from vllm_autoprune.ops.rowwise import TIE
from vllm_autoprune.ops.similarity import cosines

NONE = torch.empty(1, 0, dtype=torch.int64)


@given(seed=st.integers(0, 10_000), size=st.integers(6, 12), data=st.data())
def test_picks_have_the_largest_determinant_given_the_anchors_among_the_eligible(
    seed: int, size: int, data: st.DataObject
) -> None:

    def by_determinant(
        similarity: Tensor,
        quality: Tensor,
        count: int,
        start: list[int],
        allowed: list[int],
    ) -> list[int]:
        """Greedy MAP from the definition: every determinant is computed, in float64.

        The diagonal of cosines is 1, and the lowest index within the tolerance is picked.
        """
        exact = similarity.double().fill_diagonal_(1)
        matrix = quality[:, None].double() * exact * quality.double()
        picks = list(start)
        while len(picks) < count:
            rest = [j for j in allowed if j not in picks]
            gains = [
                float(torch.det(matrix[[*picks, j]][:, [*picks, j]])) for j in rest
            ]
            bound = min(max(gains), max(gains) * (1 - TIE))
            picks.append(
                next(j for j, gain in zip(rest, gains, strict=True) if gain >= bound)
            )
        return picks

    similarity, quality = draw_kernel(seed, 2, size)
    order = data.draw(st.permutations(range(size)))
    forced = data.draw(st.integers(0, 4))
    open_to = sorted(order[: data.draw(st.integers(max(forced, 1), size))])
    count = data.draw(st.integers(max(forced, 1), len(open_to)))
    eligible = torch.zeros(2, size, dtype=torch.bool)
    eligible[:, open_to] = True
    anchors = torch.tensor([order[:forced]] * 2, dtype=torch.int64)
    picks = greedy_map(
        similarity,
        quality,
        count,
        anchors=anchors if forced else None,
        eligible=None if len(open_to) == size else eligible,
    )
    for s, q, row in zip(similarity, quality, picks.tolist(), strict=True):
        assert row == by_determinant(s, q, count, order[:forced], open_to)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_pick_does_not_depend_on_how_the_diagonal_is_rounded(
    dtype: torch.dtype,
) -> None:
    source = torch.Generator().manual_seed(8)
    rows = torch.randn(4, 96, 512, generator=source).exp().to(dtype)
    similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
    quality = torch.ones(4, 96)
    assert not bool((similarity.diagonal(dim1=1, dim2=2).argmax(dim=1) == 0).all())
    every = torch.ones(4, 96, dtype=torch.bool)
    capped = capped_greedy_map(
        similarity,
        quality,
        2,
        anchors=NONE.expand(4, 0),
        eligible=every,
        cap=Cap(every.long(), 96),
    )
    assert (
        capped[:, 0].tolist()
        == greedy_map(similarity, quality, 2)[:, 0].tolist()
        == [0] * 4
    )
    eligible = every.index_fill(1, torch.tensor([0, 1, 2]), False)
    assert (
        greedy_map(similarity, quality, 2, eligible=eligible)[:, 0].tolist() == [3] * 4
    )


def test_an_exhausted_kernel_is_filled_up_by_quality_among_the_eligible() -> None:
    quality = torch.tensor([[0.1, 0.5, 0.9, 0.5, 0.3]])
    eligible = torch.tensor([[True, True, True, True, False]])
    flat = torch.ones(1, 5, 5)
    assert greedy_map(flat, quality, 4, eligible=eligible).tolist() == [[2, 1, 3, 0]]
    conditioned = Conditioned.on(flat, torch.tensor([[2, 0]]))
    assert greedy_map(flat, quality, 3, conditioned=conditioned).tolist() == [[1, 3, 4]]


@given(seed=st.integers(0, 10_000), data=st.data())
def test_conditioning_on_tokens_gives_the_picks_that_follow_them_as_anchors(
    seed: int, data: st.DataObject
) -> None:
    similarity, quality = draw_kernel(seed, 3, 40)
    forced = data.draw(st.integers(1, 18))
    count = data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(range(40)))
    anchors = torch.tensor(
        [order[:forced], order[1 : forced + 1], order[2 : forced + 2]]
    )
    anchored = greedy_map(similarity, quality, forced + count, anchors=anchors)
    conditioned = Conditioned.on(similarity, anchors)
    picks = greedy_map(similarity, quality, count, conditioned=conditioned)
    assert picks.tolist() == anchored[:, forced:].tolist()
    alone = Conditioned.on(similarity[2:], anchors[2:])
    assert torch.equal(conditioned.factors[2:], alone.factors)
    assert torch.equal(conditioned.residual[2:], alone.residual)
    # Tokens that are not valid do not condition.
    valid = torch.arange(forced + 1).expand(3, -1) < forced
    more = Conditioned.on(
        similarity, torch.cat([anchors, anchors[:, :1]], dim=1), valid
    )
    assert torch.equal(more.residual, conditioned.residual)


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 5), forced=st.integers(0, 4))
def test_no_cell_gets_more_than_the_cap_and_a_core_counts(
    seed: int, cap: int, forced: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    (similarity, quality) = draw_kernel(seed, 2, 20)
    cells = torch.randint(5, (2, 20), generator=source)
    order = torch.rand(2, 20, generator=source).argsort(dim=1)
    core = order[:, :6]
    anchors = order[:, 6 : 6 + forced]
    eligible = (torch.rand(2, 20, generator=source) < 0.8).scatter(
        1, order[:, 6:16], True
    )
    eligible = eligible.scatter(1, core, False)
    anchored = capped_greedy_map(
        similarity,
        quality,
        14,
        anchors=torch.cat([core, anchors], dim=1),
        eligible=eligible,
        cap=Cap(cells, cap),
    )
    conditioned = capped_greedy_map(
        similarity,
        quality,
        8,
        anchors=anchors,
        eligible=eligible,
        cap=Cap(cells, cap),
        conditioned=Conditioned.on(similarity, core),
    )
    assert torch.equal(conditioned, anchored[:, 6:])
    for image in range(2):
        members = [eligible[image] & (cells[image] == cell) for cell in range(5)]
        room = sum(min(cap, int(member.sum())) for member in members)
        row = slice(image, image + 1)
        picks = capped_greedy_map(
            similarity[row],
            quality[row],
            room,
            anchors=NONE,
            eligible=eligible[row],
            cap=Cap(cells[row], cap),
        )[0]
        assert len(set(picks.tolist())) == room and bool(eligible[image][picks].all())
        assert int(cells[image][picks].bincount().max()) <= cap
