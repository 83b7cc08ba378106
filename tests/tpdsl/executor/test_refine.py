from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import images, plain, state, take, with_relevance
from tests.tpdsl.selection_assertions import EVENLY, GRIDS, VARIANTS, assert_sound, policy_of, same
from vllm_autoprune import Grid, PruningPolicy, SelectionError, VisualTokens, materialize, refine
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.refine import keep_evenly, keep_indices, keep_reference


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
    def test_lowest_quality_is_exchanged_for_highest(self, q_e: int, kept: list[int]) -> None:
        actual = refine(self.policy(q_e, attention_proxy_saliency=1.0), self.tokens())
        assert actual.reference.tolist() == [[0, 1, 2]]
        assert actual.indices.tolist() == [kept]
        assert actual.exchanged.tolist() == [q_e]
        assert torch.equal(actual.features[0], torch.eye(8)[kept])

    def test_signals_in_agreement_with_the_base_policy_change_no_pick(self) -> None:
        policy = self.policy(3, instruction_guided_visual_relevance=1.0)
        actual = refine(policy, self.tokens())
        assert actual.indices.tolist() == [[0, 1, 2]] and actual.exchanged.tolist() == [0]

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

    def test_missing_attention_is_estimated_from_the_features(self) -> None:
        tokens = images(4)
        without = dataclasses.replace(tokens, cls_attention=None)
        policy = policy_of("anything goes")
        actual = refine(policy, without)
        assert_sound(policy, without, actual)
        assert actual.fallback.tolist() == [0, 0]

    def test_a_policy_that_reads_neither_needs_neither(self) -> None:
        blind = state(
            {**VARIANTS["divprune"], "/scoring/signals": [{"atom": "spatial_centrality_prior"}]}
        )
        tokens = plain(torch.randn(2, 24, 4), Grid(4, 6))
        policy = materialize(blind, 5)
        assert policy.needs == frozenset()
        assert_sound(policy, tokens, refine(policy, tokens))


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
