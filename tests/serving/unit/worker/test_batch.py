from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.unit.batches import N, blind, images, parts, plan, pruned
from tests.serving.unit.samples import image, rows_of, served
from vllm_autoprune import PruningPolicy, VisualTokens
from vllm_autoprune.serving.worker import region_selection
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.first_image_check import FirstImageCheck
from vllm_autoprune.serving.worker.region_selection import SelectionContext
from vllm_autoprune.serving.worker.selection import select_with_fallback
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicyParams,
    Given,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.outcome import RefinedTokens


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Budget and batch size of every selection that is run."""
    run: list[tuple[int, int]] = []

    def noted(
        policy: PruningPolicy,
        tokens: VisualTokens,
        reporter: FallbackReporter,
        given: Given | None,
        known: Sequence[Tensor | None],
    ) -> RefinedTokens:
        run.append((policy.budget, tokens.batch))
        return select_with_fallback(policy, tokens, reporter, given, known)

    monkeypatch.setattr(region_selection, "select_with_fallback", noted)
    return run


def test_rows_come_in_the_order_of_the_images_one_selection_a_budget(
    selections: list[tuple[int, int]],
) -> None:
    image_list = images(6)
    plans = [plan(8), plan(4, ids=(1,)), plan(8, ids=(2,)), plan(12), plan(4), plan(8, ids=(3,))]
    together = pruned(plans, image_list)
    assert sorted(selections) == [(4, 2), (8, 3), (12, 1)]
    for one, rows, item_plan in zip(image_list, together, plans, strict=True):
        assert rows.shape == (item_plan.budget, 16)
        kept = rows_of(one, rows)
        assert kept == sorted(set(kept))
        assert torch.equal(rows, pruned([item_plan], [one])[0])


def test_the_instruction_is_the_image_s_own() -> None:
    (one,) = images(1)
    first, second = pruned([plan(8, ids=(1,)), plan(8, ids=(2,))], [one, one])
    assert rows_of(one, first) != rows_of(one, second)
    assert torch.equal(second, pruned([plan(8, ids=(2,))], [one])[0])


def test_nothing_is_selected_or_copied_where_everything_is_kept(
    selections: list[tuple[int, int]],
) -> None:
    one, other = images(2)
    all_rows, few = pruned([plan(N), plan(8)], [one, other])
    assert all_rows is one.regions[0].projected
    assert few.shape == (8, 16)
    assert selections == [(8, 1)]


def test_profiling_gets_n_rows_and_pays_for_a_selection(selections: list[tuple[int, int]]) -> None:
    image_list = images(3)
    rows = pruned([plan(8, profile=True)] * 3, image_list)
    assert all(torch.equal(r, i.rows()) for r, i in zip(rows, image_list, strict=True))
    assert selections == [(8, 3)]


def test_the_reference_alone_is_the_base_policy_s_selection(
    selections: list[tuple[int, int]],
) -> None:
    (one,) = images(1)
    alone = served({"/constraints/selector/q_e": 0})
    (kept,) = pruned([plan(8, keep="reference")], [one])
    assert torch.equal(kept, pruned([plan(8)], [one], alone)[0])
    wide = served({"/constraints/selector/q_e": 8})
    assert not torch.equal(kept, pruned([plan(8)], [one], wide)[0])
    assert selections == [(8, 1)] * 3


def test_a_random_keep_depends_on_the_image_s_key_alone() -> None:
    one, other = images(2)
    rows = pruned(
        [plan(8, 5, keep="random"), plan(8, 6, keep="random"), plan(8, 5, (9,), keep="random")],
        [one, one, other],
    )
    first, second, third = (rows_of(i, r) for i, r in zip([one, one, other], rows, strict=True))
    assert first == third == sorted(set(first))
    assert first != second
    assert rows_of(one, pruned([plan(8, 5, keep="random")], [one])[0]) == first


def test_a_random_keep_takes_a_key_below_zero() -> None:
    (one,) = images(1)
    (rows,) = pruned([plan(8, -(2**63), keep="random")], [one])
    assert rows.shape == (8, 16)


def test_a_resized_image_of_a_fixed_grid_is_pooled_whatever_the_question() -> None:
    one, other = images(2)
    first, second, asked = pruned(
        [plan(9, keep="resized"), plan(9, keep="resized"), plan(9, ids=(9,), keep="resized")],
        [one, other, one],
    )
    # 6 x 6 tokens in 3 x 3 cells.
    square = one.regions[0].projected.view(3, 2, 3, 2, -1).mean(dim=(1, 3)).flatten(0, 1)
    assert torch.allclose(first, square, atol=1e-6)
    assert torch.equal(first, asked)
    assert not torch.equal(first, second)


def test_a_pooled_row_stands_where_the_centre_of_its_cell_does() -> None:
    """Positions and rows for later layers are channels that cannot be averaged."""
    (one,) = images(1)
    channels = torch.arange(float(N))[:, None]
    placed = dataclasses.replace(one.regions[0], extra_channels=channels)
    (rows,) = pruned([plan(9, keep="resized")], [ImageFeatures((placed,))])
    assert rows[:, -1].tolist() == [7, 9, 11, 19, 21, 23, 31, 33, 35]


def test_keeps_of_one_budget_do_not_mix() -> None:
    (one,) = images(1)
    keeps = ("random", "state", "reference", "resized")
    plans = [plan(8, 5, keep=keep) for keep in keeps]
    together = pruned(plans, [one] * 4)
    assert all(
        torch.equal(rows, pruned([item_plan], [one])[0])
        for rows, item_plan in zip(together, plans, strict=True)
    )


@pytest.mark.parametrize("off", [-3, 1])
def test_wrong_number_of_rows_is_fitted_to_the_placeholders(
    off: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM silently drops surplus rows, and its engine crashes on missing ones."""

    def wrong(
        policy: PruningPolicy, tokens: VisualTokens, reporter: FallbackReporter, *more: object
    ) -> Any:
        return select_with_fallback(served().policy(policy.budget + off), tokens, reporter)

    monkeypatch.setattr(region_selection, "select_with_fallback", wrong)
    reporter = FallbackReporter()
    with caplog.at_level("ERROR", "vllm.autoprune"):
        (rows,) = prune_images(SelectionContext(served(), parts(), reporter), [plan(8)], images(1))
    assert rows.shape[0] == 8
    assert reporter.meter.errors == {"SelectionError": 1}
    assert f"{8 + off} rows for a placeholder of 8" in caplog.text


@pytest.mark.parametrize("budget", [N + 1, 4 * N])
def test_image_smaller_than_its_plan_is_padded(budget: int) -> None:
    """The last row is repeated, because vLLM's engine crashes on missing rows."""
    image_list, reporter = images(2), FallbackReporter()
    large, small = prune_images(
        SelectionContext(served(), parts(), reporter), [plan(budget), plan(8)], image_list
    )
    assert torch.equal(large[:N], image_list[0].rows())
    assert torch.equal(large[N:], image_list[0].rows()[-1:].expand(budget - N, -1))
    assert small.shape[0] == 8
    assert reporter.meter.errors == {"SelectionError": 1}


def test_a_policy_that_raises_still_answers_for_every_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> RefinedTokens:
        raise RuntimeError("no")

    monkeypatch.setattr("vllm_autoprune.serving.worker.selection.select_tokens", broken)
    reporter = FallbackReporter()
    image_list = images(2)
    rows = prune_images(
        SelectionContext(served(), parts(), reporter), [plan(8), plan(4)], image_list
    )
    assert [r.shape[0] for r in rows] == [8, 4]
    assert reporter.meter.errors == {"RuntimeError": 2}


def test_rows_without_a_token_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = torch.full((1, 2, 16), 7.0)

    def two_more(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        return ReferenceSelection(torch.arange(budget - 2)[None], extra=extra)

    real = BASE_POLICIES["cdpruner"]
    policy = dataclasses.replace(real, needs=frozenset(), function=two_more)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    (one,) = images(1)
    reporter = FallbackReporter()
    (rows,) = prune_images(SelectionContext(blind(), parts(), reporter), [plan(8)], [one])
    assert reporter.meter.errors == {}
    assert torch.equal(rows[:6], one.rows()[:6])
    assert torch.equal(rows[6:], extra[0])


@pytest.mark.parametrize("core", [N - 2, N - 1, N, N + 1, 1000])
@pytest.mark.parametrize("budget", [1, 2, 8, N, N + 1])
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_delta_of_any_forged_core_has_its_number_of_rows(
    core: int, budget: int, tiles: int
) -> None:
    """A client may forge both numbers; without rows the engine would end."""
    state = served({"/core": {"share": 0.5}})
    regions = tuple(region for seed in range(tiles) for region in image(seed).regions)
    plans = [plan(budget, key=5, part="delta", core=core), plan(8, key=6, part="core", core=8)]
    reporter = FallbackReporter()
    rows = prune_images(
        SelectionContext(state, parts(), reporter), plans, [ImageFeatures(regions), image(9)]
    )
    assert [len(own) for own in rows] == [budget, 8]
    assert all(bool(own.isfinite().all()) for own in rows)
    if core >= N * tiles:
        assert reporter.meter.errors["RequestError"] == 1


def test_a_delta_may_be_all_tokens_beside_its_core() -> None:
    state = served({"/core": {"share": 0.5}})
    (one,) = images(1)
    core, delta = pruned(
        [plan(30, part="core", core=30), plan(N - 30, part="delta", core=30)], [one, one], state
    )
    assert sorted(rows_of(one, core) + rows_of(one, delta)) == list(range(N))


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("r_min", [None, 0, 1])
def test_a_sound_state_passes_its_first_image_of_several_regions(
    budget: int, r_min: int | None
) -> None:
    """A region exchanges some of the image's q_e, so it keeps fewer reference tokens than r_min."""
    state = served({"/constraints/selector/r_min": r_min})
    first, second, third = images(3)
    several = ImageFeatures((*first.regions, *second.regions, *third.regions))
    check, reporter = FirstImageCheck(), FallbackReporter()
    context = SelectionContext(state, parts(), reporter, check)
    (rows,) = prune_images(context, [plan(budget, key=3)], [several])
    assert rows.shape == (budget, 16)
    assert (check.unsafe, reporter.meter.errors) == (0, {})


@pytest.mark.parametrize("budget", [N - 1, N, N + 1, N + 4, N + 5])
def test_a_delta_beyond_all_tokens_ends_in_the_fillers_of_its_image(budget: int) -> None:
    """LLaVA-NeXT has newlines between rows of tokens; K may lie between its tokens and N."""
    (one,) = images(1)
    order = torch.arange(N) // 6 * 7 + torch.arange(N) % 6
    spaced = ImageFeatures((dataclasses.replace(one.regions[0], order=order),), torch.ones(16), 5)
    state = served({"/core": {"share": 0.5}})
    plans = [plan(8, part="core", core=8), plan(budget - 8, part="delta", core=8)]
    core, delta = pruned(plans, [spaced, spaced], state)
    tokens = min(budget, N) - 8
    assert len(delta) == budget - 8
    assert sorted(rows_of(one, core) + rows_of(one, delta[:tokens]))[-1] < N
    assert torch.equal(delta[tokens:], torch.ones(budget - 8 - tokens, 16))
