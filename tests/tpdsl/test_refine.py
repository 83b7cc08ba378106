from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tpdsl.samples import images, plain, shipped, state, take, with_relevance
from vllm_autoprune import (
    Grid,
    Instruction,
    PruningPolicy,
    Refined,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.tpdsl.language import RecordedPrefix
from vllm_autoprune.tpdsl.load import shipped_states
from vllm_autoprune.tpdsl.numerics import evenly, mask_of
from vllm_autoprune.tpdsl.reassembly import gather_rows
from vllm_autoprune.tpdsl.refine import keep_evenly, keep_reference, keep_these
from vllm_autoprune.tpdsl.tower import NextLayer, TowerStates

BAD = [torch.nan, torch.inf, -torch.inf]
EVENLY: list[int] = evenly(1, 36, 8, torch.device("cpu"))[0].tolist()

VARIANTS: dict[str, dict[str, object]] = {
    "shipped": {},
    "divprune": {"/base_policy": {"name": "divprune"}},
    "global": {"/base_policy": {"name": "divprune", "params": {"tile_scope": "global"}}},
    "dpp": {"/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4}},
    "conditional": {
        "/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4},
        "/scoring/kernel": {"atom": "runtime_conditional_similarity_kernel", "theta": 0.5},
    },
    "residual": {"/reassembly/strength": 0.5},
    "base alone": {"/constraints/selector/q_e": 0},
    "anything goes": {"/constraints/selector/q_e": 640},
    "r_min": {"/constraints/selector": {**shipped()["constraints"]["selector"], "r_min": 1}},
}
"""Changes to the shipped state; between them they run every atom but the safety checks."""

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3), Grid(1, 40), Grid(4, 4, tiles=5)]


def policy_of(variant: str = "shipped", budget: int = 8) -> PruningPolicy:
    return materialize(state(VARIANTS[variant]), budget)


def same(one: Refined, other: Refined, rows: tuple[slice | list[int], slice | list[int]]) -> bool:
    """All of it bit-equal, for these rows of the one and those of the other."""
    mine, yours = rows
    for field in dataclasses.fields(Refined):
        a, b = vars_of(one)[field.name], vars_of(other)[field.name]
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not torch.equal(a[mine], b[yours]):
            return False
    return True


def vars_of(found: Refined) -> dict[str, Tensor | None]:
    return {
        "features": found.features,
        "indices": found.indices,
        "reference": found.reference,
        "exchanged": found.exchanged,
        "fallback": found.fallback,
        "quality": found.quality,
    }


def assert_sound(policy: PruningPolicy, tokens: VisualTokens, found: Refined) -> None:
    """The promises that hold for every policy, image and budget below N."""
    k = policy.budget
    assert found.features.shape == (tokens.batch, k, tokens.features.shape[2])
    assert found.features.dtype == tokens.features.dtype
    assert bool(found.features.isfinite().all())
    assert found.indices.shape == found.reference.shape == (tokens.batch, k)
    assert bool((found.indices.diff(dim=1) > 0).all())
    assert int(found.indices.min()) >= 0 and int(found.indices.max()) < tokens.count
    base = mask_of(found.reference, tokens.count)
    assert base.sum(dim=1).tolist() == [k] * tokens.batch
    shared = (mask_of(found.indices, tokens.count) & base).sum(dim=1)
    assert torch.equal(found.exchanged, k - shared)
    assert int(shared.min()) >= policy.r_min
    assert int(found.exchanged.max()) <= policy.quota


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 35),
    grid=st.sampled_from(GRIDS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    clusters=st.sampled_from([1, 3, 40]),
    noise=st.sampled_from([0.0, 0.5]),
)
def test_every_policy_keeps_its_promises(
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
    found = refine(policy, tokens)
    assert_sound(policy, tokens, found)
    assert found.fallback.tolist() == [0, 0]
    if variant != "residual":
        assert torch.equal(found.features, gather_rows(tokens.features, found.indices))
    assert torch.equal(
        found.reference,
        policy.base.select(policy.state.base_policy.params, tokens, budget).picks,
    )
    again = refine(policy, images(seed, grid=grid, dtype=dtype, clusters=clusters, noise=noise))
    assert same(found, again, (slice(None), slice(None)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_batched_or_alone_or_in_another_order_the_bits_are_the_same(
    variant: str, grid: Grid
) -> None:
    policy, tokens = policy_of(variant), images(5, batch=4, grid=grid)
    together = refine(policy, tokens)
    for i in range(4):
        assert same(together, refine(policy, take(tokens, [i])), ([i], [0]))
    order = [2, 0, 3, 1]
    assert same(together, refine(policy, take(tokens, order)), (order, slice(None)))


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
def test_whatever_is_not_finite_the_promises_hold_and_other_images_do_not_notice(
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
    found, expected = refine(policy, tokens), refine(policy, clean)
    assert_sound(policy, tokens, found)
    untouched = [i for i in range(3) if i not in {image for _, image, _ in places}]
    assert same(found, expected, (untouched, untouched))


class TestFallback:
    """Codes: 0 none, 1 the reference selection, 2 an even spread."""

    @pytest.mark.parametrize("value", BAD)
    @pytest.mark.parametrize("variant", ["shipped", "divprune", "base alone"])
    def test_features_that_nothing_can_read_leave_an_even_spread(
        self, variant: str, value: float
    ) -> None:
        tokens = images(1)
        tokens.features[1, 20, 3] = value
        found = refine(policy_of(variant), tokens)
        assert found.fallback.tolist() == [0, 2]
        assert found.indices[1].tolist() == EVENLY
        assert found.exchanged[1] == 0

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("variant", ["shipped", "divprune", "dpp"])
    def test_attention_that_cannot_be_scored_leaves_the_reference(
        self, variant: str, value: float
    ) -> None:
        tokens, clean = images(1), images(1)
        assert tokens.cls_attention is not None
        tokens.cls_attention[0, 7] = value
        policy = policy_of(variant)
        found = refine(policy, tokens)
        assert found.fallback.tolist() == [1, 0]
        assert torch.equal(found.reference, refine(policy, clean).reference)
        assert found.indices[0].tolist() == sorted(found.reference[0].tolist())

    @pytest.mark.parametrize("value", BAD)
    @pytest.mark.parametrize("field", ["patches", "text"])
    @pytest.mark.parametrize(
        ("variant", "code"), [("shipped", 2), ("base alone", 2), ("divprune", 1)]
    )
    def test_an_instruction_matters_to_the_base_that_reads_it_and_to_the_scores(
        self, variant: str, code: int, field: str, value: float
    ) -> None:
        tokens = images(1)
        assert tokens.instruction is not None
        broken = tokens.instruction.patches if field == "patches" else tokens.instruction.text
        broken[1, 1, 2] = value
        assert refine(policy_of(variant), tokens).fallback.tolist() == [0, code]

    def test_what_a_policy_does_not_read_may_hold_anything(self) -> None:
        tokens, clean = images(1), images(1)
        assert tokens.cls_attention is not None and tokens.instruction is not None
        tokens.cls_attention.fill_(torch.nan)
        policy = policy_of("base alone")
        assert same(refine(policy, tokens), refine(policy, clean), (slice(None), slice(None)))
        tokens.instruction.text.fill_(torch.nan)
        blind = materialize(
            state({**VARIANTS["divprune"], "/constraints/selector/q_e": 0}), budget=8
        )
        assert refine(blind, tokens).fallback.tolist() == [0, 0]

    def test_a_signal_of_weight_zero_is_not_read(self) -> None:
        tokens = images(1)
        assert tokens.cls_attention is not None
        tokens.cls_attention.fill_(torch.nan)
        policy = materialize(state({"/scoring/signals/1/weight": 0.0}), 8)
        assert refine(policy, tokens).fallback.tolist() == [0, 0]

    def test_padding_of_the_instruction_may_hold_anything(self) -> None:
        tokens = images(1)
        given = tokens.instruction
        assert given is not None
        text = torch.cat([given.text, torch.full((2, 3, 8), torch.nan)], dim=1)
        used = torch.tensor([True, True, False, False, False]).expand(2, -1)
        padded = dataclasses.replace(
            tokens, instruction=dataclasses.replace(given, text=text, segments=used)
        )
        found = refine(policy_of(), padded)
        assert same(found, refine(policy_of(), tokens), (slice(None), slice(None)))

    def test_a_zero_patch_embedding_is_a_token_like_any_other(self) -> None:
        tokens = images(1)
        assert tokens.instruction is not None
        tokens.instruction.patches[0, 5] = 0
        assert refine(policy_of(), tokens).fallback.tolist() == [0, 0]

    @pytest.mark.parametrize("variant", ["shipped", "residual"])
    def test_the_kept_rows_are_untouched_but_for_what_is_not_finite(self, variant: str) -> None:
        tokens = images(1)
        hidden = next(i for i in range(36) if i not in EVENLY)
        tokens.features[0, EVENLY[2], 4] = torch.nan
        tokens.features[0, EVENLY[3], 5] = -torch.inf
        tokens.features[0, hidden] = torch.nan
        found = refine(policy_of(variant), tokens)
        rows = tokens.features[0, EVENLY]
        assert torch.equal(found.features[0], torch.where(rows.isfinite(), rows, 0.0))
        assert found.features[0, 2, 4] == 0 and found.features[0, 3, 5] == 0

    def test_reference_rows_are_untouched_too(self) -> None:
        tokens = images(1)
        assert tokens.cls_attention is not None
        tokens.cls_attention[0, 0] = torch.nan
        found = refine(policy_of("residual"), tokens)
        assert found.fallback.tolist() == [1, 0]
        rows = gather_rows(tokens.features, found.indices)
        assert torch.equal(found.features[0], rows[0])
        assert not torch.equal(found.features[1], rows[1])


@pytest.mark.parametrize("variant", ["shipped", "divprune", "dpp"])
def test_an_image_without_instruction_is_pruned_like_any_other(variant: str) -> None:
    tokens = images(2)
    given = tokens.instruction
    assert given is not None
    nothing = given.segments.clone()
    nothing[0] = False
    policy = policy_of(variant)
    silent = dataclasses.replace(tokens, instruction=dataclasses.replace(given, segments=nothing))
    found = refine(policy, silent)
    assert_sound(policy, silent, found)
    assert found.fallback.tolist() == [0, 0]
    assert same(found, refine(policy, tokens), ([1], [1]))
    # What its text rows hold does not matter, as none of them is a segment.
    other = dataclasses.replace(given, segments=nothing, text=given.text.flip(0))
    again = refine(policy, dataclasses.replace(tokens, instruction=other))
    assert same(found, again, ([0], [0]))


class TestNothingToPrune:
    @pytest.mark.parametrize("budget", [36, 37, 640])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_k_of_n_or_more_keeps_every_token_as_it_is(self, variant: str, budget: int) -> None:
        tokens = images(3, dtype=torch.float16)
        tokens.features[0, 3] = torch.nan
        found = refine(policy_of(variant, budget), tokens)
        assert found.features is tokens.features
        assert found.indices.tolist() == [list(range(36))] * 2
        assert found.exchanged.tolist() == found.fallback.tolist() == [0, 0]

    def test_a_grid_of_one_token(self) -> None:
        tokens = images(3, grid=Grid(1, 1))
        assert refine(policy_of(budget=1), tokens).features is tokens.features

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
    def test_the_worst_by_quality_give_way_to_the_best(self, q_e: int, kept: list[int]) -> None:
        found = refine(self.policy(q_e, attention_proxy_saliency=1.0), self.tokens())
        assert found.reference.tolist() == [[0, 1, 2]]
        assert found.indices.tolist() == [kept]
        assert found.exchanged.tolist() == [q_e]
        assert torch.equal(found.features[0], torch.eye(8)[kept])

    def test_signals_that_agree_with_the_base_policy_change_nothing(self) -> None:
        policy = self.policy(3, instruction_guided_visual_relevance=1.0)
        found = refine(policy, self.tokens())
        assert found.indices.tolist() == [[0, 1, 2]] and found.exchanged.tolist() == [0]

    def test_weights_decide_between_signals_that_disagree(self) -> None:
        def kept(relevance: float, attention: float) -> list[int]:
            policy = self.policy(
                3,
                instruction_guided_visual_relevance=relevance,
                attention_proxy_saliency=attention,
            )
            found: list[int] = refine(policy, self.tokens()).indices[0].tolist()
            return found

        assert kept(4.0, 0.25) == [0, 1, 2]
        assert kept(0.0, 1.0) == [5, 6, 7]

    def test_without_any_weight_the_base_policy_stands(self) -> None:
        found = refine(self.policy(3, attention_proxy_saliency=0.0), self.tokens())
        assert found.indices.tolist() == [[0, 1, 2]] and found.fallback.tolist() == [0]
        assert found.quality is not None and bool((found.quality == 1).all())

    def test_quality_is_there_only_where_the_state_scores(self) -> None:
        scored = refine(self.policy(1, attention_proxy_saliency=1.0), self.tokens())
        assert scored.quality is not None and scored.quality[0].argmax() == 7
        assert refine(self.policy(0, attention_proxy_saliency=1.0), self.tokens()).quality is None


class TestInputs:
    def test_a_missing_instruction_is_an_error(self) -> None:
        tokens = plain(torch.randn(2, 20, 4))
        with pytest.raises(SelectionError, match=r"reads the instruction.*fill it"):
            refine(policy_of(), tokens)

    def test_missing_attention_is_estimated_from_the_features(self) -> None:
        tokens = images(4)
        without = dataclasses.replace(tokens, cls_attention=None)
        policy = policy_of("anything goes")
        found = refine(policy, without)
        assert_sound(policy, without, found)
        assert found.fallback.tolist() == [0, 0]

    def test_a_policy_that_reads_neither_needs_neither(self) -> None:
        blind = state(
            {**VARIANTS["divprune"], "/scoring/signals": [{"atom": "spatial_centrality_prior"}]}
        )
        tokens = plain(torch.randn(2, 24, 4), Grid(4, 6))
        policy = materialize(blind, 5)
        assert policy.needs == frozenset()
        assert_sound(policy, tokens, refine(policy, tokens))


class TestLastResorts:
    def test_the_reference_alone(self) -> None:
        tokens, policy = images(5), policy_of("residual")
        found = keep_reference(policy, tokens)
        assert torch.equal(found.reference, refine(policy, tokens).reference)
        assert torch.equal(found.indices, found.reference.sort(dim=1).values)
        assert torch.equal(found.features, gather_rows(tokens.features, found.indices))
        assert found.fallback.tolist() == [1, 1] and found.exchanged.tolist() == [0, 0]

    def test_an_even_spread_reads_nothing(self) -> None:
        tokens = plain(torch.full((2, 36, 4), torch.nan))
        found = keep_evenly(8, tokens)
        assert found.indices.tolist() == [EVENLY, EVENLY]
        assert found.fallback.tolist() == [2, 2] and found.exchanged.tolist() == [0, 0]
        assert bool((found.features == 0).all())

    def test_a_given_selection_in_any_order(self) -> None:
        tokens = images(5)
        found = keep_these(tokens, torch.tensor([[9, 2, 30], [0, 35, 1]]))
        assert found.indices.tolist() == [[2, 9, 30], [0, 1, 35]]
        assert torch.equal(found.features, gather_rows(tokens.features, found.indices))
        assert found.fallback.tolist() == [0, 0]

    def test_neither_prunes_what_fits(self) -> None:
        tokens = images(5)
        for found in (keep_reference(policy_of(budget=36), tokens), keep_evenly(36, tokens)):
            assert found.features is tokens.features and found.fallback.tolist() == [0, 0]


class TestNoWaiting:
    """Nothing may read a value back to the host: on a GPU that would stall the whole batch."""

    def shapes_alone(self, device: str, grid: Grid, dtype: torch.dtype) -> VisualTokens:
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
            Instruction(
                empty(3, count, 16), empty(3, 2, 16), empty(3, 2, dtype=torch.bool), sign=-1
            ),
            tower=tower,
            language=language,
        )

    @pytest.mark.parametrize("name", shipped_states())
    @pytest.mark.parametrize("grid", [Grid(12, 12), Grid(6, 6, tiles=5)])
    def test_shipped_states_decide_everything_on_the_device(self, name: str, grid: Grid) -> None:
        # Tensors of the meta device have no values to read, and mixing in one of the host's fails.
        tokens = self.shapes_alone("meta", grid, torch.float16)
        policy = materialize(load_state(name)).at(grid.tokens)
        found = refine(policy, tokens)
        assert found.features.shape == (3, min(policy.budget, grid.tokens), 32)
        assert found.features.dtype == torch.float16
        assert found.features.is_meta and found.indices.is_meta and found.fallback.is_meta

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_so_does_every_atom(self, variant: str) -> None:
        tokens = self.shapes_alone("meta", Grid(4, 4, tiles=3), torch.bfloat16)
        assert refine(policy_of(variant), tokens).features.shape == (3, 8, 32)
        assert keep_reference(policy_of(variant), tokens).features.shape == (3, 8, 32)
        assert keep_evenly(8, tokens).indices.shape == (3, 8)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_no_shape_depends_on_a_value(self, variant: str) -> None:
        with FakeTensorMode():
            tokens = self.shapes_alone("cpu", Grid(4, 4, tiles=3), torch.float16)
            assert refine(policy_of(variant), tokens).features.shape == (3, 8, 32)
