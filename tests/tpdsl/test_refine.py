"""Algorithm 1: guarantees, inputs that are not finite, last resorts, pooling, no host sync.

Fallback codes: 0 none, 1 the reference selection, 2 an even spread.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    CORES,
    EVENLY,
    GRIDS,
    VARIANTS,
    assert_sound,
    images,
    plain,
    policy_of,
    same,
    state,
    take,
    with_core,
    with_relevance,
)
from vllm_autoprune import (
    Grid,
    Instruction,
    PruningPolicy,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.refine import (
    keep_evenly,
    keep_indices,
    keep_reference,
    pool_tokens,
    split_into_bands,
)
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words


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
    actual = refine(policy, tokens)
    assert_sound(policy, tokens, actual)
    assert actual.fallback.tolist() == [0, 0]
    if variant != "residual":
        assert torch.equal(actual.features, gather_rows(tokens.features, actual.indices))
    assert torch.equal(
        actual.reference,
        policy.base.select(policy.state.base_policy.params, tokens, budget).picks,
    )
    again = refine(policy, images(seed, grid=grid, dtype=dtype, clusters=clusters, noise=noise))
    assert same(actual, again, (slice(None), slice(None)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_results_do_not_depend_on_the_batch(variant: str, grid: Grid) -> None:
    policy, tokens = policy_of(variant), images(5, batch=4, grid=grid)
    together = refine(policy, tokens)
    for i in range(4):
        assert same(together, refine(policy, take(tokens, [i])), ([i], [0]))
    order = [2, 0, 3, 1]
    assert same(together, refine(policy, take(tokens, order)), (order, slice(None)))


class TestNothingToPrune:
    @pytest.mark.parametrize("budget", [36, 37, 640])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_k_of_n_or_more_keeps_every_token_as_it_is(self, variant: str, budget: int) -> None:
        tokens = images(3, dtype=torch.float16)
        tokens.features[0, 3] = torch.nan
        actual = refine(policy_of(variant, budget), tokens)
        assert actual.features is tokens.features
        assert actual.indices.tolist() == [list(range(36))] * 2
        assert actual.exchanged.tolist() == actual.fallback.tolist() == [0, 0]

    def test_one_token_of_each_of_two_tiles(self) -> None:
        tokens = images(3, grid=Grid(1, 1, tiles=2))
        policy = policy_of(budget=1)
        assert_sound(policy, tokens, refine(policy, tokens))


class TestExchange:
    """Eight tokens that are all unlike each other, so the base policy goes by relevance."""

    def tokens(self) -> VisualTokens:
        # Relevance falls from token 0 to token 7, and attention rises.
        relevance = torch.linspace(0.9, 0.2, 8)[None]
        return with_relevance(
            VisualTokens(torch.eye(8)[None], Grid(2, 4), torch.linspace(0.1, 0.8, 8)[None]),
            relevance,
        )

    def policy(self, q_e: int, **weights: float) -> PruningPolicy:
        signals = [{"atom": name, "weight": weight} for name, weight in weights.items()]
        pool = [{"atom": "quality_pool_builder"}]
        return materialize(
            state(
                {
                    "/scoring/signals": signals,
                    "/constraints/pool": pool,
                    "/constraints/selector/q_e": q_e,
                }
            ),
            budget=3,
        )

    @pytest.mark.parametrize(
        ("q_e", "kept"), [(0, [0, 1, 2]), (1, [1, 2, 7]), (2, [2, 6, 7]), (3, [5, 6, 7])]
    )
    def test_lowest_quality_is_exchanged_for_highest(self, q_e: int, kept: list[int]) -> None:
        actual = refine(self.policy(q_e, attention_proxy_saliency=1.0), self.tokens())
        assert actual.reference.tolist() == [[0, 1, 2]]
        assert actual.indices.tolist() == [kept]
        assert actual.exchanged.tolist() == [q_e]
        assert torch.equal(actual.features[0], torch.eye(8)[kept])

    def test_weights_decide_between_signals_that_disagree(self) -> None:
        def kept(relevance: float, attention: float) -> list[int]:
            policy = self.policy(
                3,
                instruction_guided_visual_relevance=relevance,
                attention_proxy_saliency=attention,
            )
            actual: list[int] = refine(policy, self.tokens()).indices[0].tolist()
            return actual

        assert kept(4.0, 0.25) == [0, 1, 2]
        assert kept(0.0, 1.0) == [5, 6, 7]

    def test_zero_weights_keep_the_reference(self) -> None:
        actual = refine(self.policy(3, attention_proxy_saliency=0.0), self.tokens())
        assert actual.indices.tolist() == [[0, 1, 2]] and actual.fallback.tolist() == [0]
        assert actual.quality is not None and bool((actual.quality == 1).all())

    def test_quality_is_none_if_the_state_does_not_score(self) -> None:
        scored = refine(self.policy(1, attention_proxy_saliency=1.0), self.tokens())
        assert scored.quality is not None and scored.quality[0].argmax() == 7
        assert refine(self.policy(0, attention_proxy_saliency=1.0), self.tokens()).quality is None


class TestInputs:
    def test_a_missing_instruction_is_an_error(self) -> None:
        tokens = plain(torch.randn(2, 20, 4))
        with pytest.raises(SelectionError, match=r"reads the instruction.*fill it"):
            refine(policy_of(), tokens)


def test_kept_rows_have_gradients_and_the_selection_has_none() -> None:
    """As required to train through a pruned model."""
    tokens = images(3)
    tracked = dataclasses.replace(tokens, features=tokens.features.clone().requires_grad_())
    actual = refine(policy_of("shipped", 8), tracked)
    actual.features.float().sum().backward()
    assert tracked.features.grad is not None
    touched = tracked.features.grad.ne(0).all(dim=-1)
    assert torch.equal(touched.nonzero()[:, 1].view(2, 8), actual.indices)


@pytest.mark.parametrize("variant", ["shipped", "divprune", "dpp"])
def test_an_image_without_instruction_is_pruned_like_any_other(variant: str) -> None:
    tokens = images(2)
    given = tokens.instruction
    assert given is not None
    nothing = given.segments.clone()
    nothing[0] = False
    policy = policy_of(variant)
    silent = dataclasses.replace(tokens, instruction=dataclasses.replace(given, segments=nothing))
    actual = refine(policy, silent)
    assert_sound(policy, silent, actual)
    assert actual.fallback.tolist() == [0, 0]
    assert same(actual, refine(policy, tokens), ([1], [1]))
    # What its text rows hold does not matter, as none of them is a segment.
    other = dataclasses.replace(given, segments=nothing, text=given.text.flip(0))
    again = refine(policy, dataclasses.replace(tokens, instruction=other))
    assert same(actual, again, ([0], [0]))


class TestLastResorts:
    def test_the_reference_alone(self) -> None:
        tokens, policy = images(5), policy_of("residual")
        actual = keep_reference(policy, tokens)
        assert torch.equal(actual.reference, refine(policy, tokens).reference)
        assert torch.equal(actual.indices, actual.reference.sort(dim=1).values)
        assert torch.equal(actual.features, gather_rows(tokens.features, actual.indices))
        assert actual.fallback.tolist() == [1, 1] and actual.exchanged.tolist() == [0, 0]

    def test_an_even_spread_needs_no_inputs(self) -> None:
        tokens = plain(torch.full((2, 36, 4), torch.nan))
        actual = keep_evenly(8, tokens)
        assert actual.indices.tolist() == [EVENLY, EVENLY]
        assert actual.fallback.tolist() == [2, 2] and actual.exchanged.tolist() == [0, 0]
        assert bool((actual.features == 0).all())

    def test_a_given_selection_in_any_order(self) -> None:
        tokens = images(5)
        actual = keep_indices(tokens, torch.tensor([[9, 2, 30], [0, 35, 1]]))
        assert actual.indices.tolist() == [[2, 9, 30], [0, 1, 35]]
        assert torch.equal(actual.features, gather_rows(tokens.features, actual.indices))
        assert actual.fallback.tolist() == [0, 0]

    def test_fallbacks_keep_all_tokens_if_they_fit(self) -> None:
        tokens = images(5)
        for actual in (keep_reference(policy_of(budget=36), tokens), keep_evenly(36, tokens)):
            assert actual.features is tokens.features and actual.fallback.tolist() == [0, 0]


BAD = [torch.nan, torch.inf, -torch.inf]


@given(
    variant=st.sampled_from(list(VARIANTS)),
    budget=st.integers(1, 35),
    value=st.sampled_from(BAD),
    places=st.sets(
        st.tuples(
            st.sampled_from(["features", "cls_attention", "patches", "text"]),
            st.integers(0, 1),
            st.integers(0, 35),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_non_finite_inputs_keep_guarantees_and_affect_no_other_image(
    variant: str, budget: int, value: float, places: set[tuple[str, int, int]]
) -> None:
    policy, clean, tokens = policy_of(variant, budget), images(6, batch=3), images(6, batch=3)
    assert tokens.cls_attention is not None and tokens.instruction is not None
    for name, image, token in places:
        if name == "features":
            tokens.features[image, token, token % 16] = value
        elif name == "cls_attention":
            tokens.cls_attention[image, token] = value
        elif name == "patches":
            tokens.instruction.patches[image, token, token % 8] = value
        else:
            tokens.instruction.text[image, token % 2, token % 8] = value
    actual, expected = refine(policy, tokens), refine(policy, clean)
    assert_sound(policy, tokens, actual)
    untouched = [i for i in range(3) if i not in {image for _, image, _ in places}]
    assert same(actual, expected, (untouched, untouched))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("variant", ["shipped", "divprune", "dpp"])
def test_non_finite_attention_keeps_the_reference(variant: str, value: float) -> None:
    tokens, clean = images(1), images(1)
    assert tokens.cls_attention is not None
    tokens.cls_attention[0, 7] = value
    policy = policy_of(variant)
    actual = refine(policy, tokens)
    assert actual.fallback.tolist() == [1, 0]
    assert torch.equal(actual.reference, refine(policy, clean).reference)
    assert actual.indices[0].tolist() == sorted(actual.reference[0].tolist())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", ["patches", "text"])
@pytest.mark.parametrize(("variant", "code"), [("shipped", 2), ("base alone", 2), ("divprune", 1)])
def test_non_finite_instruction_affects_base_and_scores(
    variant: str, code: int, field: str, value: float
) -> None:
    tokens = images(1)
    assert tokens.instruction is not None
    broken = tokens.instruction.patches if field == "patches" else tokens.instruction.text
    broken[1, 1, 2] = value
    assert refine(policy_of(variant), tokens).fallback.tolist() == [0, code]


def test_unread_inputs_may_be_non_finite() -> None:
    tokens, clean = images(1), images(1)
    assert tokens.cls_attention is not None and tokens.instruction is not None
    tokens.cls_attention.fill_(torch.nan)
    policy = policy_of("base alone")
    assert same(refine(policy, tokens), refine(policy, clean), (slice(None), slice(None)))
    tokens.instruction.text.fill_(torch.nan)
    blind = materialize(state({**VARIANTS["divprune"], "/constraints/selector/q_e": 0}), budget=8)
    assert refine(blind, tokens).fallback.tolist() == [0, 0]


def test_instruction_padding_may_be_non_finite() -> None:
    tokens = images(1)
    given = tokens.instruction
    assert given is not None
    text = torch.cat([given.text, torch.full((2, 3, 8), torch.nan)], dim=1)
    used = torch.tensor([True, True, False, False, False]).expand(2, -1)
    padded = dataclasses.replace(
        tokens, instruction=dataclasses.replace(given, text=text, segments=used)
    )
    actual = refine(policy_of(), padded)
    assert same(actual, refine(policy_of(), tokens), (slice(None), slice(None)))


@pytest.mark.parametrize("variant", ["shipped", "residual"])
def test_kept_rows_are_unchanged_except_non_finite_values(variant: str) -> None:
    tokens = images(1)
    hidden = next(i for i in range(36) if i not in EVENLY)
    tokens.features[0, EVENLY[2], 4] = torch.nan
    tokens.features[0, EVENLY[3], 5] = -torch.inf
    tokens.features[0, hidden] = torch.nan
    actual = refine(policy_of(variant), tokens)
    rows = tokens.features[0, EVENLY]
    assert torch.equal(actual.features[0], torch.where(rows.isfinite(), rows, 0.0))
    assert actual.features[0, 2, 4] == 0 and actual.features[0, 3, 5] == 0


def tokens_of(grid: Grid, width: int = 3, batch: int = 1) -> VisualTokens:
    generator = torch.Generator().manual_seed(grid.tokens)
    return VisualTokens(torch.randn(batch, grid.tokens, width, generator=generator), grid)


def test_a_fourth_of_a_square_is_the_mean_of_each_two_by_two() -> None:
    grid = Grid(6, 6)
    tokens = tokens_of(grid)
    pooled = pool_tokens(9, tokens)
    square = tokens.features[0].view(3, 2, 3, 2, 3)
    assert torch.allclose(pooled.features[0], square.mean(dim=(1, 3)).flatten(0, 1), atol=1e-6)
    # The token at the centre of a cell, or after it where there is none.
    assert pooled.indices[0].tolist() == [7, 9, 11, 19, 21, 23, 31, 33, 35]


def test_tokens_on_a_border_count_by_area() -> None:
    grid = Grid(1, 3)
    tokens = VisualTokens(torch.tensor([[[3.0], [6.0], [9.0]]]), grid)
    # Each cell is one and a half tokens wide.
    assert pool_tokens(2, tokens).features.flatten().tolist() == pytest.approx([4.0, 8.0])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.data())
def test_any_number_of_cells_is_met_exactly(
    height: int, width: int, tiles: int, data: st.DataObject
) -> None:
    grid = Grid(height, width, tiles)
    budget = data.draw(st.integers(1, grid.tokens))
    ones = VisualTokens(torch.ones(2, grid.tokens, 1), grid)
    pooled = pool_tokens(budget, ones)
    assert pooled.features.shape == (2, budget, 1)
    assert torch.allclose(pooled.features, torch.ones(2, budget, 1), atol=1e-5)
    assert (pooled.indices.diff(dim=1) > 0).all(), "centres are unique, in raster order"
    assert ((pooled.indices >= 0) & (pooled.indices < grid.tokens)).all()


@pytest.mark.parametrize(("budget", "bands"), [(64, (8,) * 8), (16, (4,) * 4), (8, (3, 3, 2))])
def test_cells_are_about_as_high_as_wide(budget: int, bands: tuple[int, ...]) -> None:
    assert split_into_bands(budget, 12, 12) == bands


def test_every_token_weighs_the_same_where_cells_are_equal() -> None:
    tokens = tokens_of(Grid(5, 7))
    pooled = pool_tokens(6, tokens)  # 2 x 3 cells
    assert torch.allclose(pooled.features.mean(dim=1), tokens.features.mean(dim=1), atol=1e-6)


def test_the_share_of_each_tile_comes_from_that_tile() -> None:
    grid = Grid(2, 2, 3)
    numbered = torch.arange(3.0).repeat_interleave(4)[None, :, None]
    pooled = pool_tokens(4, VisualTokens(numbered, grid))
    assert pooled.features.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]


def test_an_image_alone_has_the_bits_it_has_in_a_batch() -> None:
    tokens = tokens_of(Grid(24, 24), 64, batch=3)
    together = pool_tokens(50, tokens).features
    for i in range(3):
        alone = VisualTokens(tokens.features[i : i + 1].clone(), tokens.grid)
        assert torch.equal(pool_tokens(50, alone).features[0], together[i])


def test_what_is_not_finite_does_not_spread() -> None:
    tokens = tokens_of(Grid(4, 4))
    broken = tokens.features.clone()
    broken[0, 0] = torch.nan
    pooled = pool_tokens(4, VisualTokens(broken, tokens.grid)).features
    assert pooled.isfinite().all()
    assert torch.equal(pooled[0, 1:], pool_tokens(4, tokens).features[0, 1:])


def shapes_alone(device: str, grid: Grid, dtype: torch.dtype) -> VisualTokens:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    count = grid.tokens
    length, text = 2 + count + 6, 6
    tower = TowerStates(
        patches=empty(3, count, 24, dtype=dtype),
        keys=empty(3, count, 8, dtype=dtype),
        project=lambda rows: rows @ empty(24, 32, dtype=dtype),
        cls=empty(3, grid.tiles, 24, dtype=dtype),
        next_layer=NextLayer(empty(3, count), empty(3, count, 24, dtype=dtype)),
    )
    language = RecordedPrefix(
        start=2,
        text=empty(3, text, dtype=torch.bool),
        recorded_embeddings=empty(3, length, 32, dtype=dtype),
        recorded_states=empty(3, length, 32, dtype=dtype),
        recorded_normed=empty(3, length, 32, dtype=dtype),
        recorded_keys=empty(3, 2, length, 8, dtype=dtype),
        recorded_attention=empty(3, 2, text, length),
    )
    return VisualTokens(
        empty(3, count, 32, dtype=dtype),
        grid,
        empty(3, count),
        Instruction(empty(3, count, 16), empty(3, 2, 16), empty(3, 2, dtype=torch.bool), sign=-1),
        tower=tower,
        language=language,
        encoder=tower.patches,
        words=Words(empty(3, text, 32, dtype=dtype), empty(3, text, dtype=torch.bool)),
    )


@pytest.mark.parametrize("name", shipped_states())
@pytest.mark.parametrize("grid", [Grid(12, 12), Grid(6, 6, tiles=5)])
def test_shipped_states_do_not_synchronise(name: str, grid: Grid) -> None:
    tokens = shapes_alone("meta", grid, torch.float16)
    policy = materialize(load_state(name)).at(grid.tokens)
    with forbid_waiting():
        actual = refine(policy, tokens)
    assert actual.features.shape == (3, min(policy.budget, grid.tokens), 32)
    assert actual.features.dtype == torch.float16
    assert actual.features.is_meta and actual.indices.is_meta and actual.fallback.is_meta


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_do_not_depend_on_values(variant: str) -> None:
    with FakeTensorMode():
        tokens = shapes_alone("cpu", Grid(4, 4, tiles=3), torch.float16)
        assert refine(policy_of(variant), tokens).features.shape == (3, 8, 32)


@pytest.mark.parametrize(
    ("base", "core"),
    [
        *((base, "cover") for base in BASE_POLICIES),
        *(("cdpruner", core) for core in CORES if core != "cover"),
    ],
)
def test_core_and_delta_do_not_synchronise(base: str, core: str) -> None:
    tokens = shapes_alone("meta", Grid(4, 4, tiles=3), torch.bfloat16)
    selector = {"atom": "constrained_pool_dpp_selector", "q_e": 2}
    changes: dict[str, object] = {
        "/base_policy": {"name": base},
        "/constraints/selector": selector,
        "/reassembly": {"atom": "mean_residual", "strength": 0.5},
    }
    policy = materialize(with_core(CORES[core], changes), 8)
    with forbid_waiting():
        actual = refine(policy, tokens)
    assert actual.features.shape == (3, 8, 32) and actual.indices.shape == (3, 8)
    assert actual.features.is_meta and actual.indices.is_meta and actual.fallback.is_meta
