"""Batches of images: rows, controls, inputs, regions, and what is selected together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

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
    prune,
    region,
    rows_of,
    served,
)
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, materialize
from vllm_autoprune.serving.plan import Choice, Chooser
from vllm_autoprune.serving.worker import batch, selection
from vllm_autoprune.serving.worker.batch import SelectionContext
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    IndexCache,
    Region,
)
from vllm_autoprune.serving.worker.question import InputEmbeddings
from vllm_autoprune.serving.worker.rows import KeptRows
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    ReferenceSelection,
    RefinedTokens,
)
from vllm_autoprune.tpdsl.tokens import split_over_parts

SPLIT = served({"/core": {"share": 0.5}})


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Budget and batch size of every selection that is run."""
    sizes: list[tuple[int, int]] = []

    def select(
        policy: PruningPolicy, tokens: VisualTokens, *more: Any
    ) -> RefinedTokens:
        sizes.append((policy.budget, tokens.batch))
        return select_with_fallback(policy, tokens, *more)

    monkeypatch.setattr(batch, "select_with_fallback", select)
    return sizes


def test_rows_come_in_the_order_of_the_images_one_selection_a_budget(
    selections: list[tuple[int, int]],
) -> None:
    image_list = images(6)
    plans = [
        plan(8),
        plan(4, ids=(1,)),
        plan(8, ids=(2,)),
        plan(12),
        plan(4),
        plan(8, ids=(3,)),
    ]
    together = prune(plans, image_list)
    assert sorted(selections) == [(4, 2), (8, 3), (12, 1)]
    for picture, rows, item in zip(image_list, together, plans, strict=True):
        indices = rows_of(picture, rows)
        assert (len(indices), indices) == (item.budget, sorted(set(indices)))
        assert torch.equal(rows, prune([item], [picture])[0])


def test_profiling_gets_n_rows_and_pays_for_a_selection(
    selections: list[tuple[int, int]],
) -> None:
    image_list = images(3)
    rows = prune([plan(8, profile=True)] * 3, image_list)
    assert all(torch.equal(r, i.rows()) for r, i in zip(rows, image_list, strict=True))
    assert selections == [(8, 3)]


# ---- controls ----


def test_the_reference_alone_is_the_base_policy_s_selection() -> None:
    alone, wide = (served({"/constraints/selector/q_e": quota}) for quota in (0, 8))
    (reference,) = prune([plan(8, keep="reference")], images(1))
    assert torch.equal(reference, prune([plan(8)], images(1), alone)[0])
    assert not torch.equal(reference, prune([plan(8)], images(1), wide)[0])


def test_a_random_keep_depends_on_the_image_s_key_alone() -> None:
    pictures = [image(0), image(0), image(1)]
    plans = [plan(8, key, (9,), keep="random") for key in (5, 6, 5)]
    rows = prune(plans, pictures)
    draws = [rows_of(*pair) for pair in zip(pictures, rows, strict=True)]
    assert draws[0] == draws[2] == sorted(set(draws[0])) != draws[1]
    assert (
        rows_of(image(0), prune([plan(8, 5, keep="random")], [image(0)])[0]) == draws[0]
    )


def test_a_resized_image_of_a_fixed_grid_is_pooled_whatever_the_question() -> None:
    plans = [plan(9, ids=ids, keep="resized") for ids in ((7,), (7,), (9,))]
    pooled, other, questioned = prune(plans, [image(0), image(1), image(0)])
    # 6 x 6 tokens in 3 x 3 cells.
    square = (
        image(0)
        .regions[0]
        .projected.view(3, 2, 3, 2, -1)
        .mean(dim=(1, 3))
        .flatten(0, 1)
    )
    torch.testing.assert_close(pooled, square)
    assert torch.equal(pooled, questioned) and not torch.equal(pooled, other)


def test_embeddings_are_looked_up_before_anything_that_may_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lookup is a collective of all ranks, which wait for one that raised before it."""
    looked_up: list[int] = []

    def embed(ids: Tensor) -> Tensor:
        looked_up.append(len(ids))
        return ids[:, None].expand(-1, 16).float()

    def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
        if tensors[0].dim() == 1:  # of a signal
            raise RuntimeError("broken")
        return torch.stack([*tensors])

    model = batch.ModelParts(
        lambda rows: rows, embed, InputEmbeddings(embed, torch.device("cpu"))
    )
    state = served({"/base_policy": {"name": "mmtok"}})
    reporter = FallbackReporter()
    bare = region(0, SIX)
    picture = ImageFeatures(
        (replace(bare, signals={"encoder": bare.projected, **bare.signals}),)
    )
    for errors in ({}, {"RuntimeError": 1}):
        context = batch.SelectionContext(state, model, reporter)
        batch.prune_images(context, [plan(8, language=(3, 4, 5))], [picture])
        assert (looked_up, reporter.errors) == ([1, 3], errors)
        looked_up.clear()
        monkeypatch.setattr(batch, "stack", stack_rows)


# ---- as many rows as placeholders ----


@pytest.mark.parametrize("off", [-3, 1])
def test_wrong_number_of_rows_is_fitted_to_the_placeholders(
    off: int, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    """vLLM silently drops surplus rows, and its engine crashes on missing ones."""

    def wrong(
        policy: PruningPolicy, tokens: VisualTokens, reporter: Any, *_: object
    ) -> Any:
        return select_with_fallback(
            materialize(served().state, policy.budget + off), tokens, reporter
        )

    monkeypatch.setattr(batch, "select_with_fallback", wrong)
    (rows,) = prune([plan(8)], images(1), errors={"SelectionError": 1})
    assert rows.shape[0] == 8
    assert f"{8 + off} rows for a placeholder of 8" in logged.text


@pytest.mark.parametrize("core", [N - 2, N - 1, N, N + 1, 1000])
@pytest.mark.parametrize("budget", [1, 2, 8, N, N + 1])
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_delta_of_any_forged_core_has_its_number_of_rows(
    core: int, budget: int, tiles: int
) -> None:
    """A client may forge both numbers; without rows the engine would end."""
    tiled = ImageFeatures(tuple(region(seed, SIX) for seed in range(tiles)))
    plans = [
        plan(budget, key=5, part="delta", core=core),
        plan(8, key=6, part="core", core=8),
    ]
    forged = core >= N * tiles
    errors = {"RequestError": 1} if forged else {}
    if budget > N * tiles - (0 if forged else core):
        errors["SelectionError"] = 1
    rows = prune(plans, [tiled, image(9)], SPLIT, errors=errors)
    assert [len(part) for part in rows] == [budget, 8]
    assert all(bool(part.isfinite().all()) for part in rows)


@pytest.mark.parametrize("budget", [N - 1, N, N + 1, N + 4, N + 5])
def test_a_delta_beyond_all_tokens_ends_in_the_fillers_of_its_image(
    budget: int,
) -> None:
    """LLaVA-NeXT has newlines between rows of tokens; K may lie between its tokens and N."""
    order = torch.arange(N) // 6 * 7 + torch.arange(N) % 6
    spaced = replace(image(0).regions[0], order=order)
    picture = ImageFeatures((spaced,), torch.ones(16), 5)
    plans = [plan(8, part="core", core=8), plan(budget - 8, part="delta", core=8)]
    core, delta = prune(plans, [picture] * 2, SPLIT)
    tokens = min(budget, N) - 8
    assert len(delta) == budget - 8
    assert (
        len({*rows_of(image(0), core), *rows_of(image(0), delta[:tokens])})
        == 8 + tokens
    )
    assert torch.equal(delta[tokens:], torch.ones(budget - 8 - tokens, 16))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_rows_of_an_image_that_keeps_all_are_a_copy_of_its_cached_ones(
    filled: bool, channels: bool
) -> None:
    order = torch.arange(N) // 6 * 7 + torch.arange(N) % 6
    part = replace(
        image(0).regions[0],
        order=order if filled else None,
        extra_channels=torch.ones(N, 4) if channels else None,
    )
    picture = ImageFeatures((part,))
    if filled:
        picture = ImageFeatures((part,), torch.zeros(part.rows.shape[1]), gaps=6)
    count = picture.tokens
    item = KeptRows.keep_all(picture, count)
    assert item.positions.tolist() == list(range(count))
    assert torch.equal(item.rows, picture.rows())
    storages = {tensor.untyped_storage().data_ptr() for tensor in picture.tensors()}
    assert item.rows.untyped_storage().data_ptr() not in storages


def test_rows_without_a_token_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the channels of tokens in the middle of the two halves of those not kept."""
    extra = torch.full((1, 2, 16), 7.0)
    channels = torch.arange(float(N))[:, None]

    def two_more(_: object, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        return ReferenceSelection(torch.arange(budget - 2)[None], extra=extra)

    policy = replace(BASE_POLICIES["cdpruner"], needs=frozenset(), function=two_more)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    placed = replace(image(0).regions[0], extra_channels=channels)
    (rows,) = prune([plan(8)], [ImageFeatures((placed,))], blind())
    assert torch.equal(rows[:6], placed.rows[:6])
    middle = torch.tensor([[6.0 + 7], [6 + 22]])
    assert torch.equal(rows[6:], torch.cat([extra[0], middle], dim=1))


# ---- what policies compare ----


def with_signals(part: Region, **signals: Tensor) -> ImageFeatures:
    """An image of the region with more signals."""
    more: Any = signals
    return ImageFeatures((replace(part, signals={**part.signals, **more}),))


def test_patches_are_compared_where_the_images_have_them() -> None:
    (part,) = image(0).regions
    pictures = [with_signals(part, relevance=sign * part.projected) for sign in (1, -1)]
    plain, compared, mirrored = (
        prune([plan(8)], [i])[0] for i in (image(0), *pictures)
    )
    assert torch.equal(plain, compared) and not torch.equal(plain, mirrored)


BEFORE: dict[str, object] = {
    "/rank_at": "merger_in",
    "/base_policy": {"name": "divprune"},
}
AFTER: dict[str, object] = {"/base_policy": {"name": "divprune"}}


def merged(seed: int) -> Region:
    """A region with the tokens that enter its merger, wider than those that leave it."""
    rows = torch.randn(N, 24, generator=torch.Generator().manual_seed(100 + seed))
    norms = torch.stack([rows.abs().sum(dim=1), rows.norm(dim=1)], dim=1)
    return with_signals(region(seed, SIX), encoder=rows, merger_norms=norms).regions[0]


def test_a_state_that_ranks_before_the_merger_keeps_rows_after_it() -> None:
    regions = [merged(1), merged(2)]
    plans = [plan(8, 1), plan(8, 2)]
    rows = prune(plans, [ImageFeatures((part,)) for part in regions], served(BEFORE))
    # Images that have nothing but the tokens that enter the merger.
    entering = [
        with_signals(
            Region(SIX, part.signals["encoder"], part.signals), relevance=part.projected
        )
        for part in regions
    ]
    expected = prune(plans, entering, served(AFTER))
    for part, entered, ours, theirs in zip(
        regions, entering, rows, expected, strict=True
    ):
        assert rows_of(ImageFeatures((part,)), ours) == rows_of(entered, theirs)
    after = prune(plans, [ImageFeatures((part,)) for part in regions], served(AFTER))
    assert not torch.equal(torch.stack(after), torch.stack(rows))


def test_states_that_rank_elsewhere_share_no_core() -> None:
    """One image, one core policy, one cache: each delta stands beside its own state's core."""
    picture = ImageFeatures((merged(1),))
    indices = IndexCache()
    deltas = []
    for changes in (AFTER, BEFORE):
        state = served({**changes, "/core": {"share": 0.5}})
        item = [plan(4, 1, part="delta", core=8)]
        deltas += prune(item, [picture], state, indices)
        assert torch.equal(deltas[-1], prune(item, [picture], state, IndexCache())[0])
    assert not torch.equal(*deltas)


# ---- regions, with text between them or without ----

BY_QUALITY: dict[str, object] = {
    "/reassembly": {"atom": "reassemble/nearest.mean.residual.score", "strength": 0.0}
}
"""Rows in the order of their quality, whatever their places."""


@pytest.mark.parametrize("budget", [1, 2, 5, 3 * N - 1])
@pytest.mark.parametrize(
    ("keep", "changes"),
    [("state", {}), ("state", BY_QUALITY), ("random", {}), ("reference", {})],
    ids=["state", "by quality", "random", "reference"],
)
def test_rows_stand_in_their_tile(
    budget: int, keep: Chooser, changes: Mapping[str, object]
) -> None:
    tiled = ImageFeatures(tuple(region(seed, SIX) for seed in range(3)))
    (rows,) = prune([plan(budget, key=3, keep=keep)], [tiled], served({**changes}))
    tiles = [row // N for row in rows_of(tiled, rows)]
    assert tiles == sorted(tiles)
    shares = split_over_parts(budget, [N] * 3, [1] * 3)
    assert tuple(tiles.count(tile) for tile in range(3)) == shares


@pytest.mark.parametrize("budget", [1, 5, 3 * N - 1, 3 * N])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("changes", [{}, BY_QUALITY, {"/core": {"share": 0.5}}])
@pytest.mark.parametrize("profile", [False, True])
def test_text_stands_behind_the_tokens_that_it_follows_in_the_whole_image(
    budget: int, ordered: bool, changes: Mapping[str, object], profile: bool
) -> None:
    """Whatever the order of rows."""
    order = torch.arange(3 * N).roll(N)
    three = region(0, Grid(6, 6, 3))
    image = ImageFeatures((replace(three, order=order if ordered else None),))
    text = ((0, 3), (0, 4), (7, 5), (N, 3), (2 * N + 1, 6), (3 * N, 3))
    item = plan(budget, key=3, text=text, profile=profile)
    (rows,) = prune([item], [image], served({**changes}))
    bare = prune([replace(item, text=())], [image], served({**changes}))[0]
    all_rows = image.rows()
    assert len(rows) == len(bare) + len(text)
    is_text = (rows == rows[:, :1]).all(dim=1)
    assert rows[is_text, 0].tolist() == [token for _, token in text]
    assert {*map(tuple, rows[~is_text].tolist())} == {*map(tuple, bare.tolist())}
    texts_before = is_text.cumsum(0)
    for row, texts in zip(rows[~is_text], texts_before[~is_text].tolist(), strict=True):
        is_row = (all_rows == row).all(dim=1)
        index = int(is_row.long().argmax()) if is_row.any() else 3 * N - 1
        assert texts == sum(offset <= index for offset, _ in text)


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("r_min", [None, 0, 1])
def test_a_sound_state_is_safe_on_images_of_several_regions(
    budget: int, r_min: int | None
) -> None:
    """A region exchanges some of the image's q_e, so it keeps fewer reference tokens than r_min."""
    tiled = ImageFeatures(tuple(region(seed, SIX) for seed in range(3)))
    state = served({"/constraints/selector/r_min": r_min})
    (rows,) = prune([plan(budget, key=3)], [tiled], state)
    assert len(rows) == budget


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 81), st.integers(1, 5)), min_size=1),
)
def test_shares_of_a_budget_add_up_within_the_room_of_each_part(
    budget: int, parts: Sequence[tuple[int, int]]
) -> None:
    sizes = [size for size, _ in parts]
    weights = [weight for _, weight in parts]
    shares = split_over_parts(budget, sizes, weights)
    assert sum(shares) == min(budget, sum(sizes))
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_every_tile_counts_the_same_and_the_first_part_takes_the_rest() -> None:
    assert [split_over_parts(k, [16, 48], [1, 4]) for k in (10, 11, 1)] == [
        (2, 8),
        (3, 8),
        (1, 0),
    ]


# ---- what is selected together, and remembered ----


def test_instructions_of_several_lengths_are_read_one_by_one(
    selections: list[tuple[int, int]],
) -> None:
    """Neither padding nor a batch may change a selection."""
    pictures = [
        with_signals(part, encoder=part.projected)
        for part in (region(0, SIX), region(1, SIX))
    ]
    plans = [plan(8, language=ids) for ids in ((3, 4, 5), (6,))]
    model = batch.ModelParts(
        lambda rows: rows, lambda ids: ids[:, None].expand(-1, 16).float()
    )
    reporter = FallbackReporter()
    state = served({"/base_policy": {"name": "mmtok"}})
    context = SelectionContext(
        state, replace(model, relevance=parts().relevance), reporter
    )
    batch.prune_images(context, plans, pictures)
    assert (selections, reporter.errors) == ([(8, 1), (8, 1)], {})


def test_a_core_is_selected_once_though_its_delta_comes_before_it(
    selections: list[tuple[int, int]],
) -> None:
    plans = [plan(4, 1, part="delta", core=8), plan(8, 1, part="core", core=8)]
    prune(plans, [image(0)] * 2, SPLIT)
    assert [count for _, count in selections] == [1, 1]


def test_tokens_of_a_failed_selection_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indices = IndexCache()
    sound = prune([plan(8, 1)], images(1))[0]
    broken = Mock(side_effect=RuntimeError("broken"))
    with monkeypatch.context() as patched:
        patched.setattr(selection, "select_tokens", broken)
        prune([plan(8, 1)], images(1), indices=indices, errors={"RuntimeError": 1})
    assert torch.equal(prune([plan(8, 1)], images(1), indices=indices)[0], sound)


def test_a_recall_after_all_tokens_has_the_fillers_that_are_left() -> None:
    order = torch.arange(N) // 6 * 7 + torch.arange(N) % 6
    spaced = replace(image(0).regions[0], order=order)
    picture = ImageFeatures((spaced,), torch.ones(16), 6)
    item = plan(3, part="recall", earlier=(Choice(N + 2),))
    assert torch.equal(prune([item], [picture])[0], torch.ones(3, 16))
