"""Guarantees of every base policy: K rows, batch independence, robustness, no host sync."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.base_policies.samples import select
from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import mapped, state, take
from tests.tpdsl.samples import whole_images as images
from vllm_autoprune import (
    Grid,
    SelectionError,
    VisualTokens,
    materialize,
    safety_check,
)
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, Given, ReferenceSelection
from vllm_autoprune.tpdsl.tokens import NextLayer

WIDTH = 16

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in sorted(BASE_POLICIES)},
    "divprune global": ("divprune", {"tile_scope": "global"}),
    "visionzip with cls": ("visionzip", {"patch_only": False}),
    "visionzip many contextual": ("visionzip", {"contextual": 6}),
    "visionzip none contextual": ("visionzip", {"contextual": 0}),
    "prumerge": ("prumerge_plus", {"plus": False}),
    "prumerge_plus drop_extra": ("prumerge_plus", {"drop_extra": True}),
    "dart embeddings": ("dart", {"space": "embeddings"}),
    "sparsevlm recycle": ("sparsevlm", {"recycle": True}),
    "pyramiddrop layer": ("pyramiddrop", {"layer": 24}),
    "cen_divprune global": ("cen_divprune", {"tile_scope": "global", "weight": "none"}),
    "cen_divprune scaled": ("cen_divprune", {"scale_variance": True, "weight": "sigmoid"}),
    "cen_divprune uncentred": ("cen_divprune", {"centre": False}),
    "cen_cdpruner global": ("cen_cdpruner", {"tile_scope": "global"}),
    "cen_cdpruner core": ("cen_cdpruner", {"relevance": False}),
    "scope flat": ("scope", {"alpha": 0.0}),
    "mmtok core": ("mmtok", {"words": False}),
    "prunesid cls": ("prunesid", {"mode": "cls"}),
    "prunesid qwen": ("prunesid", {"mode": "qwen"}),
    "prunesid strict": ("prunesid", {"threshold": 0.0, "groups": 2}),
    "holov bands": ("holov", {"bands": 5}),
    "fsr core": ("fsr", {"alpha": 0.0}),
    "fsr select": ("fsr", {"kappa": 0.0, "rho": 0.2}),
    "fsr merge": ("fsr", {"kappa": 9.0, "rho": 0.0}),
    "idpruner relevance": ("idpruner", {"importance": "relevance", "balance": 0.0}),
}
GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3), Grid(4, 4, tiles=5)]


def run(variant: str, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    name, params = VARIANTS[variant]
    return select(name, tokens, budget, **params)


def parts(selection: ReferenceSelection) -> list[Tensor]:
    return [
        part for part in (selection.picks, selection.merged, selection.extra) if part is not None
    ]


def assert_sound(selection: ReferenceSelection, tokens: VisualTokens, budget: int) -> None:
    extra = 0 if selection.extra is None else selection.extra.shape[1]
    assert selection.picks.dtype == torch.int64
    assert selection.picks.shape == (tokens.batch, budget - extra)
    assert all(row.unique().numel() == row.numel() > 0 for row in selection.picks)
    assert int(selection.picks.min()) >= 0 and int(selection.picks.max()) < tokens.count
    if selection.merged is not None:
        assert selection.merged.shape == (tokens.batch, budget - extra, WIDTH)
    if selection.extra is not None:
        assert selection.extra.shape == (tokens.batch, extra, WIDTH) and extra > 0


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        *((grid, torch.float32) for grid in GRIDS),
        (GRIDS[0], torch.bfloat16),
        (GRIDS[2], torch.float16),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exactly_k_rows(variant: str, grid: Grid, dtype: torch.dtype) -> None:
    tokens = images(1, grid=grid, dtype=dtype)
    for budget in (1, 2, 3, 4, 5, 8, 11, 12, 13, 20, grid.tokens - 1):
        actual = run(variant, tokens, budget)
        assert_sound(actual, tokens, budget)
        assert all(bool(part.isfinite().all()) for part in parts(actual))
        assert actual.rows(tokens).dtype == dtype
        if actual.extra is not None:
            assert actual.extra.dtype == dtype


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_images_of_a_batch_are_independent(variant: str, grid: Grid) -> None:
    tokens = images(2, batch=3, grid=grid)
    for budget in (1, 7, 13):
        together = parts(run(variant, tokens, budget))
        for image in range(3):
            alone = parts(run(variant, take(tokens, [image]), budget))
            assert all(
                torch.equal(a[image : image + 1], b) for a, b in zip(together, alone, strict=True)
            )


# Golden cases of several tiles hold the one scale of relevance over them.
SCALED_OVER_TILES = ("cdpruner", "cen_cdpruner", "fsr")
"""Policies whose relevance is normalised over all tiles of an image."""

PER_TILE = [
    name
    for name, (policy, params) in VARIANTS.items()
    if "language" not in BASE_POLICIES[policy].needs
    and "tile_scope" not in params
    and (policy not in SCALED_OVER_TILES or "core" in name)
    and params.get("importance") != "relevance"
]


@pytest.mark.parametrize("budget", [7, 11])
@pytest.mark.parametrize("variant", PER_TILE)
def test_tiles_are_selected_each_on_its_own(variant: str, budget: int) -> None:
    tokens = images(4, batch=1, grid=Grid(3, 4, tiles=3), noise=1.0)
    actual = run(variant, tokens, budget)
    for tile in range(3):
        alone = run(variant, tile_of(tokens, tile), budget // 3 + (tile < budget % 3))
        mine = actual.picks[0] // 12 == tile
        assert (actual.picks[0, mine] - 12 * tile).tolist() == alone.picks[0].tolist()
        if alone.merged is not None and actual.merged is not None:
            torch.testing.assert_close(actual.merged[0, mine], alone.merged[0])
        if alone.extra is not None and actual.extra is not None:
            torch.testing.assert_close(actual.extra[0, tile], alone.extra[0, 0])


def tile_of(tokens: VisualTokens, tile: int) -> VisualTokens:
    """A tile as an image of its own; what has one row a tile has one, and the text is the same."""
    size = tokens.grid.per_tile

    def cut(values: Tensor) -> Tensor:
        if values.shape[1] == tokens.count:
            return values[:, size * tile : size * (tile + 1)]
        return values[:, tile : tile + 1] if values.shape[1] == tokens.grid.tiles else values

    tower, instruction = tokens.require_tower(), tokens.require_instruction()
    layer = tokens.require_next_layer()
    return VisualTokens(
        cut(tokens.features),
        Grid(tokens.grid.height, tokens.grid.width),
        cls_attention=cut(tokens.require_cls_attention()),
        instruction=replace(instruction, patches=cut(instruction.patches)),
        encoder=cut(tokens.require_encoder()),
        words=tokens.words,
        tower=replace(
            tower,
            patches=cut(tower.patches),
            keys=cut(tower.keys),
            cls=None if tower.cls is None else cut(tower.cls),
            next_layer=NextLayer(cut(layer.attention), cut(layer.keys)),
        ),
    )


GREEDY = [
    *("divprune", "divprune global", "cdpruner", "cen_divprune", "cen_divprune scaled"),
    *("cen_divprune global", "cen_cdpruner", "cen_cdpruner core", "cen_cdpruner global"),
    *("scope", "mmtok", "mmtok core", "idpruner", "idpruner relevance"),
]


def given(tokens: VisualTokens, kept: Tensor) -> Given:
    closed = mask_from_indices(kept, tokens.count)
    return Given(kept, closed, closed, kept.shape[1])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("variant", GREEDY)
def test_a_greedy_policy_goes_on_from_its_own_picks(variant: str, grid: Grid) -> None:
    """The first picks of a larger budget are those of a smaller one, as a core and a delta."""
    tokens = images(7, grid=grid, noise=1.0)
    name, params = VARIANTS[variant]
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    whole = policy.select(call.params, tokens, 13).picks
    for kept in (grid.tiles, grid.tiles + 2):
        picks = whole[:, :kept]
        assert torch.equal(policy.select(call.params, tokens, kept).picks, picks)
        more = policy.select_given(call.params, tokens, 13 - kept, given(tokens, picks))
        assert torch.equal(more, whole[:, kept:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_given_tokens_are_not_picked_again(variant: str) -> None:
    tokens = images(8, grid=Grid(3, 4, tiles=3))
    name, params = VARIANTS[variant]
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    more = policy.select_given(call.params, tokens, 9, given(tokens, kept))
    both = torch.cat([kept, more], dim=1)
    assert all(row.unique().numel() == 12 for row in both)
    if policy.continuation is None:  # its first picks that are not given
        for image, order in enumerate(policy.select_picks(call.params, tokens, 13)):
            first = [pick for pick in order.tolist() if pick not in kept[image].tolist()]
            assert more[image].tolist()[:5] == first[:5] or name in NOT_NESTED


NOT_NESTED = ("holov", "prunesid", "prumerge_plus", "visionzip", "dart", "sparsevlm")
"""Policies whose picks at K are not the first of those at a larger K."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_only_read(variant: str) -> None:
    """A server gives a selection the features that it keeps for further questions, not a copy."""
    tokens = images(2)
    before: list[tuple[Tensor, Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        before.append((tensor, tensor.clone()))
        return tensor

    cosine = record(tokens.cosine.clone())
    run(variant, mapped(replace(tokens, known_cosine=cosine), record), 7)
    assert len(before) > 8
    assert all(torch.equal(tensor, copy) for tensor, copy in before)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("grid", GRIDS[:2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_non_finite_input_repeats_no_index(variant: str, grid: Grid, poison: float) -> None:
    clean = images(3, grid=grid)

    def spoil(share: float, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        hit = torch.rand(tensor[0].shape, generator=torch.Generator().manual_seed(4)) < share
        return torch.cat([tensor[:1].masked_fill(hit, poison), tensor[1:]])

    for share in (0.05, 1.0):
        tokens = mapped(clean, partial(spoil, share))
        for budget in (1, 9, 30):
            actual = run(variant, tokens, budget)
            assert_sound(actual, tokens, budget)
            wanted = run(variant, clean, budget)
            assert all(
                torch.equal(a[1], b[1]) for a, b in zip(parts(actual), parts(wanted), strict=True)
            )


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_identical_tokens_give_k_unique_picks(variant: str, value: float) -> None:
    def flat(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor

    tokens = mapped(images(5, grid=Grid(3, 4, tiles=3)), flat)
    for budget in (1, 5, 20, 35):
        actual = run(variant, tokens, budget)
        assert_sound(actual, tokens, budget)
        assert all(bool(part.isfinite().all()) for part in parts(actual))


@pytest.mark.parametrize("grid", GRIDS[:2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_selection_does_not_synchronise_with_the_device(variant: str, grid: Grid) -> None:
    tokens = mapped(images(6, grid=grid), lambda tensor: tensor.to("meta"))
    with forbid_waiting():
        assert all(part.is_meta for part in parts(run(variant, tokens, 9)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_do_not_depend_on_values(variant: str) -> None:
    with FakeTensorMode():
        tokens = images(7, grid=Grid(3, 4, tiles=3))
        actual = run(variant, tokens, 10)
        extra = 0 if actual.extra is None else actual.extra.shape[1]
        assert actual.picks.shape == (2, 10 - extra)


@pytest.mark.parametrize("variant", VARIANTS)
def test_safety_check_passes(variant: str) -> None:
    name, params = VARIANTS[variant]
    for budget in (1, 4, 32):
        changes: dict[str, object] = {"/base_policy": {"name": name, "params": params}}
        record = safety_check(materialize(state(changes), budget))
        assert record.failures() == ()


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_missing_inputs_are_named_in_the_error(name: str) -> None:
    tokens = images(8)
    given = {
        "cls_attention": replace(tokens, cls_attention=None),
        "instruction": replace(tokens, instruction=None),
        "encoder": replace(tokens, encoder=None),
        "tower": replace(tokens, tower=None),
        "words": replace(tokens, words=None),
        "language": replace(tokens, language=None),
    }
    policy = BASE_POLICIES[name]
    for need in policy.needs_of(policy.default_params) & set(given):
        with pytest.raises(SelectionError, match=rf"VisualTokens\.{need} is None"):
            select(name, given[need], 4)
    bare = VisualTokens(tokens.features, tokens.grid)
    if not BASE_POLICIES[name].needs:
        assert_sound(select(name, bare, 4), bare, 4)
