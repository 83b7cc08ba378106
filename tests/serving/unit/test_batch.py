"""Batches of images: rows, budgets, inputs of policies, regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.serving.unit.samples import (
    SIX,
    N,
    blind,
    image,
    images,
    parts,
    plan,
    pruned,
    region,
    rows_of,
    served,
)
from vllm_autoprune import PruningPolicy, VisualTokens
from vllm_autoprune.serving.plan import encode_state, split_over_parts
from vllm_autoprune.serving.worker import regions
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.features import CoreCache, ImageFeatures, Region, Signals
from vllm_autoprune.serving.worker.regions import SelectionContext
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    FirstImageCheck,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    Given,
    PolicyParams,
    ReferenceSelection,
    RefinedTokens,
)


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Budget and batch size of every selection that is run."""
    run: list[tuple[int, int]] = []

    def noted(
        policy: PruningPolicy,
        tokens: VisualTokens,
        reporter: FallbackReporter,
        earlier: Given | None,
        known: Sequence[Tensor | None],
    ) -> RefinedTokens:
        run.append((policy.budget, tokens.batch))
        return select_with_fallback(policy, tokens, reporter, earlier, known)

    monkeypatch.setattr(regions, "select_with_fallback", noted)
    return run


def test_rows_come_in_the_order_of_the_images_one_selection_a_budget(
    selections: list[tuple[int, int]],
) -> None:
    image_list = images(6)
    plans = [plan(8), plan(4, ids=(1,)), plan(8, ids=(2,)), plan(12), plan(4), plan(8, ids=(3,))]
    together = pruned(plans, image_list)
    assert sorted(selections) == [(4, 2), (8, 3), (12, 1)]
    for picture, rows, item_plan in zip(image_list, together, plans, strict=True):
        assert rows.shape == (item_plan.budget, 16)
        kept = rows_of(picture, rows)
        assert kept == sorted(set(kept))
        assert torch.equal(rows, pruned([item_plan], [picture])[0])


def test_profiling_gets_n_rows_and_pays_for_a_selection(selections: list[tuple[int, int]]) -> None:
    image_list = images(3)
    rows = pruned([plan(8, profile=True)] * 3, image_list)
    assert all(torch.equal(r, i.rows()) for r, i in zip(rows, image_list, strict=True))
    assert selections == [(8, 3)]


def test_the_reference_alone_is_the_base_policy_s_selection(
    selections: list[tuple[int, int]],
) -> None:
    (picture,) = images(1)
    alone = served({"/constraints/selector/q_e": 0})
    (kept,) = pruned([plan(8, keep="reference")], [picture])
    assert torch.equal(kept, pruned([plan(8)], [picture], alone)[0])
    wide = served({"/constraints/selector/q_e": 8})
    assert not torch.equal(kept, pruned([plan(8)], [picture], wide)[0])
    assert selections == [(8, 1)] * 3


def test_a_random_keep_depends_on_the_image_s_key_alone() -> None:
    picture, other = images(2)
    rows = pruned(
        [plan(8, 5, keep="random"), plan(8, 6, keep="random"), plan(8, 5, (9,), keep="random")],
        [picture, picture, other],
    )
    baseline, second, third = (
        rows_of(i, r) for i, r in zip([picture, picture, other], rows, strict=True)
    )
    assert baseline == third == sorted(set(baseline))
    assert baseline != second
    assert rows_of(picture, pruned([plan(8, 5, keep="random")], [picture])[0]) == baseline


def test_a_resized_image_of_a_fixed_grid_is_pooled_whatever_the_question() -> None:
    picture, other = images(2)
    baseline, second, asked = pruned(
        [plan(9, keep="resized"), plan(9, keep="resized"), plan(9, ids=(9,), keep="resized")],
        [picture, other, picture],
    )
    # 6 x 6 tokens in 3 x 3 cells.
    square = picture.regions[0].projected.view(3, 2, 3, 2, -1).mean(dim=(1, 3)).flatten(0, 1)
    assert torch.allclose(baseline, square, atol=1e-6)
    assert torch.equal(baseline, asked)
    assert not torch.equal(baseline, second)


@pytest.mark.parametrize("off", [-3, 1])
def test_wrong_number_of_rows_is_fitted_to_the_placeholders(
    off: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM silently drops surplus rows, and its engine crashes on missing ones."""

    def wrong(
        policy: PruningPolicy, tokens: VisualTokens, reporter: FallbackReporter, *more: object
    ) -> Any:
        return select_with_fallback(served().policy(policy.budget + off), tokens, reporter)

    monkeypatch.setattr(regions, "select_with_fallback", wrong)
    reporter = FallbackReporter()
    with caplog.at_level("ERROR", "vllm.autoprune"):
        (rows,) = prune_images(SelectionContext(served(), parts(), reporter), [plan(8)], images(1))
    assert rows.shape[0] == 8
    assert reporter.meter.errors == {"SelectionError": 1}
    assert f"{8 + off} rows for a placeholder of 8" in caplog.text


def test_rows_without_a_token_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = torch.full((1, 2, 16), 7.0)

    def two_more(params: PolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        return ReferenceSelection(torch.arange(budget - 2)[None], extra=extra)

    real = BASE_POLICIES["cdpruner"]
    policy = dataclasses.replace(real, needs=frozenset(), function=two_more)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    (picture,) = images(1)
    reporter = FallbackReporter()
    (rows,) = prune_images(SelectionContext(blind(), parts(), reporter), [plan(8)], [picture])
    assert reporter.meter.errors == {}
    assert torch.equal(rows[:6], picture.rows()[:6])
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
    assert [len(part) for part in rows] == [budget, 8]
    assert all(bool(part.isfinite().all()) for part in rows)
    if core >= N * tiles:
        assert reporter.meter.errors["RequestError"] == 1


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("r_min", [None, 0, 1])
def test_a_sound_state_passes_its_first_image_of_several_regions(
    budget: int, r_min: int | None
) -> None:
    """A region exchanges some of the image's q_e, so it keeps fewer reference tokens than r_min."""
    state = served({"/constraints/selector/r_min": r_min})
    baseline, second, third = images(3)
    several = ImageFeatures((*baseline.regions, *second.regions, *third.regions))
    check, reporter = FirstImageCheck(), FallbackReporter()
    context = SelectionContext(state, parts(), reporter, check)
    (rows,) = prune_images(context, [plan(budget, key=3)], [several])
    assert rows.shape == (budget, 16)
    assert (check.unsafe, reporter.meter.errors) == (0, {})


@pytest.mark.parametrize("budget", [N - 1, N, N + 1, N + 4, N + 5])
def test_a_delta_beyond_all_tokens_ends_in_the_fillers_of_its_image(budget: int) -> None:
    """LLaVA-NeXT has newlines between rows of tokens; K may lie between its tokens and N."""
    (picture,) = images(1)
    order = torch.arange(N) // 6 * 7 + torch.arange(N) % 6
    spaced = ImageFeatures(
        (dataclasses.replace(picture.regions[0], order=order),), torch.ones(16), 5
    )
    state = served({"/core": {"share": 0.5}})
    plans = [plan(8, part="core", core=8), plan(budget - 8, part="delta", core=8)]
    core, delta = pruned(plans, [spaced, spaced], state)
    tokens = min(budget, N) - 8
    assert len(delta) == budget - 8
    assert sorted(rows_of(picture, core) + rows_of(picture, delta[:tokens]))[-1] < N
    assert torch.equal(delta[tokens:], torch.ones(budget - 8 - tokens, 16))


# ---- ranking before the patch merger ----


def with_signals(part: Region, **signals: Tensor) -> Region:
    """The region with more signals."""
    more: Any = signals
    return dataclasses.replace(part, signals={**part.signals, **more})


def test_patches_are_compared_where_the_images_have_them() -> None:
    (picture,) = images(1)
    (tiled,) = picture.regions
    mirrored = ImageFeatures((with_signals(tiled, relevance=-tiled.projected),))
    itself = ImageFeatures((with_signals(tiled, relevance=tiled.projected),))
    plain, same, other = (pruned([plan(8)], [i])[0] for i in (picture, itself, mirrored))
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)


BEFORE: dict[str, object] = {"/rank_at": "merger_in", "/base_policy": {"name": "divprune"}}
AFTER: dict[str, object] = {"/base_policy": {"name": "divprune"}}


def merged(seed: int) -> ImageFeatures:
    """An image with the tokens that enter its merger, wider than those that leave it."""
    source = torch.Generator().manual_seed(100 + seed)
    rows = torch.randn(N, 24, generator=source)
    norms = torch.stack([rows.abs().sum(dim=1), rows.norm(dim=1)], dim=1)
    alone = with_signals(region(seed, SIX), encoder=rows, merger_norms=norms)
    return ImageFeatures((alone,))


def with_cosine(picture: ImageFeatures, before: bool) -> ImageFeatures:
    """The image with the cosines that the server's own state compares its tokens by."""
    (part,) = picture.regions
    tokens = part.signals["encoder"] if before else part.projected
    cosine = VisualTokens(tokens[None], SIX).cosine[0]
    return ImageFeatures((with_signals(part, cosine=cosine),))


def ranked(picture: ImageFeatures) -> ImageFeatures:
    """An image that has nothing but the tokens that enter the merger."""
    (part,) = picture.regions
    signals: Signals = {**part.signals, "relevance": part.projected}
    alone = Region(part.grid, part.signals["encoder"], signals)
    return ImageFeatures((alone,))


def test_a_state_that_ranks_before_the_merger_keeps_rows_after_it() -> None:
    image_list = [merged(1), merged(2)]
    plans = [plan(8, 1), plan(8, 2)]
    rows = pruned(plans, image_list, served(BEFORE))
    alone = pruned(plans, [ranked(picture) for picture in image_list], served(AFTER))
    for picture, kept, expected in zip(image_list, rows, alone, strict=True):
        assert rows_of(picture, kept) == rows_of(ranked(picture), expected)
    after = pruned(plans, image_list, served(AFTER))
    assert not torch.equal(torch.stack(after), torch.stack(rows))


def test_plans_that_rank_before_and_after_the_merger_mix() -> None:
    """Each image of a mixed batch keeps what it keeps alone, whichever state is the server's."""
    image_list = [merged(seed) for seed in range(4)]
    before, after = (encode_state(served(changes).state) for changes in (BEFORE, AFTER))
    plans = [plan(8, seed, state=(before, after, b"")[seed % 3]) for seed in range(4)]
    for part in (BEFORE, AFTER):
        image_list = [with_cosine(picture, part is BEFORE) for picture in image_list]
        together = pruned(plans, image_list, served(part))
        for picture, rows, item in zip(image_list, together, plans, strict=True):
            assert torch.equal(rows, pruned([item], [picture], served(part))[0])
    image_list = [with_cosine(picture, True) for picture in image_list]
    swapped = pruned(plans, image_list, served(BEFORE))
    assert torch.equal(swapped[0], together[0]) and torch.equal(swapped[1], together[1])


def test_states_that_rank_elsewhere_share_no_core() -> None:
    """One image, one core policy, one cache: each delta stands beside its own state's core."""
    picture, core = merged(1), {"/core": {"share": 0.5}}
    cores = CoreCache(1 << 20)

    def delta(changes: dict[str, object], known: CoreCache) -> Tensor:
        reporter = FallbackReporter()
        context = SelectionContext(served({**changes, **core}), parts(), reporter, cores=known)
        (rows,) = prune_images(context, [plan(4, 1, part="delta", core=8)], [picture])
        assert reporter.meter.errors == {}
        return rows

    baseline, second = delta(AFTER, cores), delta(BEFORE, cores)
    assert torch.equal(baseline, delta(AFTER, CoreCache(0)))
    assert torch.equal(second, delta(BEFORE, CoreCache(0)))
    assert not torch.equal(baseline, second)


def test_images_without_a_merger_s_input_fall_back_and_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    with caplog.at_level("ERROR", "vllm.autoprune"):
        (rows,) = prune_images(
            SelectionContext(served(BEFORE), parts(), reporter), [plan(8)], images(1)
        )
    assert rows.shape == (8, 16)
    assert reporter.meter.errors == {"SelectionError": 2}
    assert "rank_at" in caplog.text


# ---- tiles with text between them ----

BY_QUALITY: dict[str, object] = {
    "/reassembly": {"atom": "reassemble/nearest.mean.residual.score", "strength": 0.0}
}
"""Rows in the order of their quality, whatever their places."""


@pytest.mark.parametrize("rest_at", [0, -1])
@pytest.mark.parametrize("budget", [1, 2, 5, 3 * N - 1])
@pytest.mark.parametrize(
    ("keep", "changes"),
    [("state", {}), ("state", BY_QUALITY), ("random", {}), ("reference", {})],
    ids=["state", "by quality", "random", "reference"],
)
def test_rows_stand_in_their_tile(
    budget: int, keep: Any, changes: dict[str, object], rest_at: int
) -> None:
    tiles = tuple(image(seed).regions[0] for seed in range(3))
    tiled = ImageFeatures(tiles, rest_at=rest_at)
    (rows,) = pruned([plan(budget, key=3, keep=keep)], [tiled], served(changes))
    expected = split_over_parts(budget, [N] * 3, [1] * 3, rest_at=rest_at)
    assert [row // N for row in rows_of(tiled, rows)] == [
        tile for tile, count in enumerate(expected) for _ in range(count)
    ]


# ---- shares of regions ----


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 81), st.integers(1, 5)), min_size=1),
)
def test_shares_of_a_budget_add_up_within_the_room_of_each_part(
    budget: int, parts: list[tuple[int, int]]
) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    shares = split_over_parts(budget, sizes, weights)
    assert sum(shares) == min(budget, sum(sizes))
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_every_tile_counts_the_same_and_the_first_part_takes_the_rest() -> None:
    assert [split_over_parts(k, [16, 48], [1, 4]) for k in (10, 11, 1)] == [(2, 8), (3, 8), (1, 0)]
