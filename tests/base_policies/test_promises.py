"""Guarantees of every base policy: K rows, batch independence, robustness, no host sync, a page."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import images, mapped, take
from vllm_autoprune import Grid, SelectionError, VisualTokens
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicy,
    BasePolicyParams,
    Given,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.tokens import Words

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


def policy_of(variant: str) -> tuple[BasePolicy, BasePolicyParams]:
    name, params = VARIANTS[variant]
    policy = BASE_POLICIES[name]
    return policy, policy.call.model_validate({"name": name, "params": params}).params


def run(variant: str, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    policy, params = policy_of(variant)
    return policy.select(params, tokens, budget)


def parts(selection: ReferenceSelection) -> list[Tensor]:
    every = (selection.picks, selection.merged, selection.extra)
    return [part for part in every if part is not None]


def same(selection: ReferenceSelection, other: ReferenceSelection, image: int, at: int) -> bool:
    pairs = zip(parts(selection), parts(other), strict=True)
    return all(torch.equal(a[image], b[at]) for a, b in pairs)


def assert_sound(selection: ReferenceSelection, tokens: VisualTokens, budget: int) -> None:
    extra = 0 if selection.extra is None else selection.extra.shape[1]
    assert selection.picks.dtype == torch.int64
    assert selection.picks.shape == (tokens.batch, budget - extra)
    assert all(row.unique().numel() == row.numel() > 0 for row in selection.picks)
    assert int(selection.picks.min()) >= 0 and int(selection.picks.max()) < tokens.count
    assert selection.merged is None or selection.merged.shape == (*selection.picks.shape, WIDTH)
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
        selection = run(variant, tokens, budget)
        assert_sound(selection, tokens, budget)
        assert all(bool(part.isfinite().all()) for part in parts(selection))
        assert selection.rows(tokens).dtype == dtype
        assert selection.extra is None or selection.extra.dtype == dtype


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_images_of_a_batch_are_independent(variant: str, grid: Grid) -> None:
    tokens = images(2, batch=3, grid=grid)
    for budget in (1, 7, 13):
        together = run(variant, tokens, budget)
        for image in range(3):
            assert same(together, run(variant, take(tokens, [image]), budget), image, 0)


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
    selection = run(variant, tokens, budget)
    for tile in range(3):
        alone = run(variant, tile_of(tokens, tile), budget // 3 + (tile < budget % 3))
        mine = selection.picks[0] // 12 == tile
        assert (selection.picks[0, mine] - 12 * tile).tolist() == alone.picks[0].tolist()
        if alone.merged is not None and selection.merged is not None:
            torch.testing.assert_close(selection.merged[0, mine], alone.merged[0])
        if alone.extra is not None and selection.extra is not None:
            torch.testing.assert_close(selection.extra[0, tile], alone.extra[0, 0])


def tile_of(tokens: VisualTokens, tile: int) -> VisualTokens:
    """A tile as an image of its own; what has one row a tile has one, and the text is the same."""
    size = tokens.grid.per_tile

    def cut(values: Tensor) -> Tensor:
        if values.shape[1] == tokens.count:
            return values[:, size * tile : size * (tile + 1)]
        return values[:, tile : tile + 1] if values.shape[1] == tokens.grid.tiles else values

    grid = Grid(tokens.grid.height, tokens.grid.width)
    inputs = {field.name: mapped(vars(tokens)[field.name], cut) for field in fields(VisualTokens)}
    return VisualTokens(**{**inputs, "grid": grid, "language": None})


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
    policy, params = policy_of(variant)
    every = policy.select(params, tokens, 13).picks
    for kept in (grid.tiles, grid.tiles + 2):
        picks = every[:, :kept]
        assert torch.equal(policy.select(params, tokens, kept).picks, picks)
        more = policy.select_given(params, tokens, 13 - kept, given(tokens, picks))
        assert torch.equal(more, every[:, kept:])


NOT_NESTED = ("holov", "prunesid", "prumerge_plus", "visionzip", "dart", "sparsevlm")
"""Policies whose picks at K are not the first of those at a larger K."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_given_tokens_are_not_picked_again(variant: str) -> None:
    tokens = images(8, grid=Grid(3, 4, tiles=3))
    policy, params = policy_of(variant)
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    more = policy.select_given(params, tokens, 9, given(tokens, kept))
    assert all(row.unique().numel() == 12 for row in torch.cat([kept, more], dim=1))
    if policy.continuation is None and policy.name not in NOT_NESTED:
        for image, order in enumerate(policy.select_picks(params, tokens, 13)):
            others = [pick for pick in order.tolist() if pick not in kept[image].tolist()]
            assert more[image].tolist()[:5] == others[:5]


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_only_read(variant: str) -> None:
    """A server gives a selection the features that it keeps for further questions, not a copy."""
    tokens = images(2)
    before: list[tuple[Tensor, Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        before.append((tensor, tensor.clone()))
        return tensor

    run(variant, mapped(replace(tokens, known_cosine=tokens.cosine.clone()), record), 7)
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
            selection = run(variant, tokens, budget)
            assert_sound(selection, tokens, budget)
            assert same(selection, run(variant, clean, budget), 1, 1)


@pytest.mark.parametrize("policy", ["mmtok", "cdpruner", "trim"])
def test_padding_of_words_and_segments_is_not_read(policy: str) -> None:
    tokens = images(2)
    words, instruction = tokens.require_words(), tokens.require_instruction()
    unread = torch.zeros(2, 3, dtype=torch.bool)

    def padded(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.full_like(rows[:, :1], torch.nan).expand(-1, 3, -1)], 1)

    more = replace(
        tokens,
        words=Words(padded(words.embeddings), torch.cat([words.used, unread], dim=1)),
        instruction=replace(
            instruction,
            text=padded(instruction.text),
            segments=torch.cat([instruction.segments, unread], dim=1),
        ),
    )
    assert torch.equal(run(policy, more, 9).picks, run(policy, tokens, 9).picks)


@pytest.mark.parametrize("grid", GRIDS[:2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_selection_does_not_synchronise_with_the_device(variant: str, grid: Grid) -> None:
    tokens = mapped(images(6, grid=grid), lambda tensor: tensor.to("meta"))
    with forbid_waiting():
        assert all(part.is_meta for part in parts(run(variant, tokens, 9)))


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_missing_inputs_are_named_in_the_error(name: str) -> None:
    tokens, policy = images(8), BASE_POLICIES[name]
    bare = VisualTokens(tokens.features, tokens.grid)
    needs = policy.needs_of(policy.default_params) - {"next_layer"}
    if not needs:
        assert_sound(run(name, bare, 4), bare, 4)
    for need in needs:
        nothing: dict[str, Any] = {need: None}
        with pytest.raises(SelectionError, match=rf"VisualTokens\.{need} is None"):
            run(name, replace(tokens, **nothing), 4)


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_the_page_on_base_policies_has_a_row_and_a_paragraph_of_each(name: str) -> None:
    policy = BASE_POLICIES[name]
    assert all(field.description for field in type(policy.default_params).model_fields.values())
    page = (Path(__file__).parents[2] / "docs/base-policies.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    row = next(line.split(" | ") for line in lines if line.startswith(f"| `{name}` |"))
    assert row[2] == (", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-")
    asks = "yes" if policy.core is None else "optional"
    free = policy.needs.isdisjoint(INSTRUCTION_NEEDS)
    assert row[3].rstrip(" |") == ("-" if free else asks)
    assert f"**{name}**: {policy.doc} " in page
