"""Algorithm 1: guarantees, inputs that are not finite, last resorts, pooling, no host sync.

Fallback codes: 0 none, 1 the reference selection, 2 an even spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    BLEND,
    CORES,
    GRIDS,
    VARIANTS,
    Changes,
    assert_sound,
    images,
    on_meta,
    plain,
    policy_of,
    same,
    state,
    take,
)
from vllm_autoprune import (
    Grid,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.ops.rowwise import evenly_spaced, gather_rows
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.refine import keep_evenly, keep_indices, keep_reference, pool_tokens

EVENLY: list[int] = evenly_spaced(1, 36, 8, torch.device("cpu"))[0].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 35),
    grid=st.sampled_from(GRIDS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    clusters=st.sampled_from([1, 3, 40]),
    noise=st.sampled_from([0.0, 0.5]),
)
def test_guarantees_of_every_policy(
    variant: str,
    seed: int,
    budget: int,
    grid: Grid,
    dtype: torch.dtype,
    clusters: int,
    noise: float,
) -> None:
    policy = policy_of(variant, budget)
    tokens = images(seed, grid=grid, dtype=dtype, clusters=clusters, noise=noise)
    refined = refine(policy, tokens)
    assert_sound(policy, tokens, refined)
    assert bool((refined.indices.diff(dim=1) > 0).all())
    assert refined.fallback.tolist() == [0, 0]
    if variant != "residual":
        assert torch.equal(refined.features, gather_rows(tokens.features, refined.indices))
    base = policy.base.select(policy.state.base_policy.params, tokens, budget)
    assert torch.equal(refined.reference, base.picks)
    again = images(seed, grid=grid, dtype=dtype, clusters=clusters, noise=noise)
    assert same(refined, refine(policy, again))


@pytest.mark.parametrize("budget", [36, 37, 640])
def test_k_of_n_or_more_keeps_every_token_as_it_is(budget: int) -> None:
    tokens = images(3, dtype=torch.float16)
    tokens.features[0, 3] = torch.nan
    refined = [refine(policy_of(variant, budget), tokens) for variant in VARIANTS]
    refined += [keep_reference(policy_of(budget=budget), tokens), keep_evenly(budget, tokens)]
    for kept in refined:
        assert kept.features is tokens.features
        assert kept.indices.tolist() == [list(range(36))] * 2
        assert kept.exchanged.tolist() == kept.fallback.tolist() == [0, 0]


def test_one_token_of_each_of_two_tiles() -> None:
    tokens, policy = images(3, grid=Grid(1, 1, tiles=2)), policy_of(budget=1)
    assert_sound(policy, tokens, refine(policy, tokens))


def test_a_missing_instruction_is_an_error() -> None:
    with pytest.raises(SelectionError, match=r"reads the instruction.*fill it"):
        refine(policy_of(), plain(torch.randn(2, 20, 4)))


def test_kept_rows_have_gradients_and_the_selection_has_none() -> None:
    """As required to train through a pruned model."""
    tokens = images(3)
    features = tokens.features.clone().requires_grad_()
    refined = refine(policy_of(), replace(tokens, features=features))
    refined.features.float().sum().backward()
    assert features.grad is not None
    touched = features.grad.ne(0).all(dim=-1)
    assert torch.equal(touched.nonzero()[:, 1].view(2, 8), refined.indices)


@pytest.mark.parametrize("variant", ["sample", "divprune", "dpp"])
def test_an_image_without_instruction_is_pruned_like_any_other(variant: str) -> None:
    tokens, policy = images(2), policy_of(variant)
    instruction = tokens.require_instruction()
    used = instruction.segments.clone()
    used[0] = False
    silent = replace(tokens, instruction=replace(instruction, segments=used))
    refined = refine(policy, silent)
    assert_sound(policy, silent, refined)
    assert refined.fallback.tolist() == [0, 0]
    assert same(refined, refine(policy, tokens), [1], [1])
    # What its text rows hold does not matter, as none of them is a segment.
    unread = instruction.text.clone()
    unread[0] = torch.nan
    other = replace(instruction, segments=used, text=unread)
    assert same(refined, refine(policy, replace(tokens, instruction=other)))


def test_last_resorts() -> None:
    tokens, policy = images(5), policy_of("residual")
    reference = keep_reference(policy, tokens)
    assert torch.equal(reference.reference, refine(policy, tokens).reference)
    assert torch.equal(reference.indices, reference.reference.sort(dim=1).values)
    assert torch.equal(reference.features, gather_rows(tokens.features, reference.indices))
    assert reference.fallback.tolist() == [1, 1] and reference.exchanged.tolist() == [0, 0]
    # An even spread needs no inputs.
    spread = keep_evenly(8, plain(torch.full((2, 36, 4), torch.nan)))
    assert spread.indices.tolist() == [EVENLY, EVENLY] and bool((spread.features == 0).all())
    assert spread.fallback.tolist() == [2, 2] and spread.exchanged.tolist() == [0, 0]
    named = keep_indices(tokens, torch.tensor([[9, 2, 30], [0, 35, 1]]))
    assert named.indices.tolist() == [[2, 9, 30], [0, 1, 35]]
    assert torch.equal(named.features, gather_rows(tokens.features, named.indices))
    assert named.fallback.tolist() == [0, 0]


INPUTS: dict[str, Callable[[VisualTokens], Tensor]] = {
    "features": lambda tokens: tokens.features,
    "attention": lambda tokens: tokens.require_cls_attention()[:, :, None],
    "patches": lambda tokens: tokens.require_instruction().patches,
    "text": lambda tokens: tokens.require_instruction().text,
    "tower": lambda tokens: tokens.require_tower().patches,
}


TOWER: Changes = {
    **VARIANTS["divprune"],
    "/scoring/signals": [{"atom": "spatial_centrality_prior"}],
    "/source": {"tokens": {"atom": "vision_tokens@vision_tower"}},
}


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        *((VARIANTS[variant], "attention", 1) for variant in ("sample", "divprune", "dpp")),
        *((VARIANTS[variant], name, 2) for variant in ("sample", "base alone") for name in (
            "patches", "text", "features")),
        *((VARIANTS["divprune"], name, 1) for name in ("patches", "text")),
        (TOWER, "tower", 1),
        # Inputs that are not read may hold anything.
        (VARIANTS["base alone"], "attention", 0),
        ({**VARIANTS["divprune"], "/constraints/selector/q_e": 0}, "text", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_kept_of_an_image_with_an_input_that_is_not_finite(
    changes: Changes, name: str, code: int, value: float
) -> None:
    policy, tokens, clean = materialize(state(changes), 8), images(1), images(1)
    INPUTS[name](tokens)[1, 1] = value
    refined, expected = refine(policy, tokens), refine(policy, clean)
    assert refined.fallback.tolist() == [0, code]
    kept = {0: expected.indices, 1: expected.reference.sort(dim=1).values}.get(code)
    assert refined.indices[1].tolist() == (EVENLY if kept is None else kept[1].tolist())
    assert code == 2 or torch.equal(refined.reference, expected.reference)


@pytest.mark.parametrize("variant", ["sample", "residual"])
def test_kept_rows_are_unchanged_except_non_finite_values(variant: str) -> None:
    tokens = images(1)
    hidden = next(i for i in range(36) if i not in EVENLY)
    tokens.features[0, EVENLY[2], 4] = torch.nan
    tokens.features[0, EVENLY[3], 5] = -torch.inf
    tokens.features[0, hidden] = torch.nan
    refined, rows = refine(policy_of(variant), tokens), tokens.features[0, EVENLY]
    assert torch.equal(refined.features[0], torch.where(rows.isfinite(), rows, 0.0))


class TestPooling:
    """The control that replaces the tokens of an image by means of cells."""

    def test_a_fourth_of_a_square_is_the_mean_of_each_two_by_two(self) -> None:
        tokens = images(1, batch=1)
        pooled = pool_tokens(9, tokens)
        square = tokens.features[0].view(3, 2, 3, 2, -1)
        assert torch.allclose(pooled.features[0], square.mean(dim=(1, 3)).flatten(0, 1), atol=1e-6)
        # The token at the centre of a cell, or after it where there is none.
        assert pooled.indices[0].tolist() == [7, 9, 11, 19, 21, 23, 31, 33, 35]

    @pytest.mark.parametrize(
        ("values", "grid", "budget", "means"),
        [
            # Each cell is one and a half tokens wide.
            ([3.0, 6, 9], Grid(1, 3), 2, [4.0, 8]),
            ([0.0] * 4 + [1] * 4 + [2] * 4, Grid(2, 2, tiles=3), 4, [0.0, 0, 1, 2]),
            # About as high as wide: bands of 3, 3 and 2 cells.
            (
                [float(i // 12 // 4) for i in range(144)],
                Grid(12, 12),
                8,
                [0.0] * 3 + [1] * 3 + [2] * 2,
            ),
        ],
    )
    def test_cells_by_hand(
        self, values: list[float], grid: Grid, budget: int, means: list[float]
    ) -> None:
        pooled = pool_tokens(budget, plain(torch.tensor(values)[:, None], grid))
        assert pooled.features.flatten().tolist() == pytest.approx(means)

    @given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.data())
    def test_any_number_of_cells_is_met_exactly(
        self, height: int, width: int, tiles: int, data: st.DataObject
    ) -> None:
        grid = Grid(height, width, tiles)
        budget = data.draw(st.integers(1, grid.tokens))
        pooled = pool_tokens(budget, VisualTokens(torch.ones(2, grid.tokens, 1), grid))
        assert torch.allclose(pooled.features, torch.ones(2, budget, 1), atol=1e-5)
        assert (pooled.indices.diff(dim=1) > 0).all(), "centres are unique, in raster order"
        assert ((pooled.indices >= 0) & (pooled.indices < grid.tokens)).all()

    def test_an_image_alone_has_the_bits_it_has_in_a_batch_and_nan_does_not_spread(self) -> None:
        tokens = images(1, grid=Grid(24, 24), width=64, batch=3)
        together = pool_tokens(50, tokens).features
        broken = tokens.features.clone()
        broken[2, 0] = torch.nan
        spoilt = pool_tokens(50, replace(tokens, features=broken)).features
        assert torch.equal(spoilt[:2], together[:2]) and torch.equal(spoilt[2, 1:], together[2, 1:])
        assert spoilt.isfinite().all()
        for i in range(3):
            assert torch.equal(pool_tokens(50, take(tokens, [i])).features[0], together[i])


@pytest.mark.parametrize("name", shipped_states())
@pytest.mark.parametrize("grid", [Grid(12, 12), Grid(6, 6, tiles=5)])
def test_shipped_states_do_not_synchronise(name: str, grid: Grid) -> None:
    tokens = on_meta(images(grid=grid, dtype=torch.float16))
    policy = materialize(load_state(name)).at(grid.tokens)
    with forbid_waiting():
        refined = refine(policy, tokens)
    assert refined.features.shape == (2, min(policy.budget, grid.tokens), 16)
    assert refined.features.dtype == torch.float16
    assert refined.features.is_meta and refined.indices.is_meta and refined.fallback.is_meta


@pytest.mark.parametrize(
    ("base", "core"),
    [
        *((base, "cover") for base in BASE_POLICIES),
        *(("cdpruner", core) for core in CORES if core != "cover"),
    ],
)
def test_core_and_delta_do_not_synchronise(base: str, core: str) -> None:
    tokens = on_meta(images(grid=Grid(4, 4, tiles=3), dtype=torch.bfloat16))
    changes: Changes = {
        **BLEND,
        "/base_policy": {"name": base},
        "/constraints/selector": {"atom": "constrained_pool_dpp_selector", "q_e": 2},
        "/core": CORES[core],
    }
    policy = materialize(state(changes), 8)
    with forbid_waiting():
        refined = refine(policy, tokens)
    assert refined.features.shape == (2, 8, 16) and refined.indices.shape == (2, 8)
    assert refined.features.is_meta and refined.indices.is_meta and refined.fallback.is_meta
