"""Guarantees of every base policy: K rows, batch independence, robustness, no host sync."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.base_policies.samples import WIDTH, images, mapped, select, take
from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import state
from vllm_autoprune import Grid, SelectionError, VisualTokens, materialize, safety_check
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection

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
