"""Views, priors and budgets, and how a state is resolved at a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.samples import call, images, means, plain, state, whole_images
from vllm_autoprune import (
    BudgetError,
    Grid,
    StateError,
    materialize,
    refine,
)
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.atoms.source import (
    FIXED_BUDGETS,
    PriorInputs,
    apply_view,
    run_budget,
    run_prior,
)
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicy,
    BasePolicyCall,
    BasePolicyParams,
    PublishedSelection,
)
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.tokens import VisualTokens, split_over_tiles

DIVPRUNE = BASE_POLICIES["divprune"].call.model_validate({"name": "divprune"})


def known(picks: list[int], policy: BasePolicyCall = DIVPRUNE, count: int = 6) -> PriorInputs:
    tokens = plain(torch.eye(count))
    return PriorInputs(tokens, policy, len(picks), torch.tensor([picks]))


def redundancy(tokens: VisualTokens) -> Tensor:
    picks = torch.zeros(1, 1, dtype=torch.int64)
    return run_signal(call("redundancy_density_penalty", m=1), tokens, picks)


class TestViews:
    # Two tiles of two tokens; tokens 0 and 2 are alike, and lie in different tiles.
    TOKENS = plain(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]), Grid(1, 2, tiles=2)
    )

    @means("vision_tokens@post_projector")
    def test_view_after_the_projector_compares_within_tiles(self) -> None:
        seen = apply_view(call("vision_tokens@post_projector"), self.TOKENS)
        assert seen is self.TOKENS
        assert redundancy(seen).abs().tolist() == [[0, 0, 1, 1]]  # the nearest other: -1 of (2, 3)

    @means("vision_tokens@pre_llm")
    def test_view_before_the_language_model_compares_across_tiles(self) -> None:
        seen = apply_view(call("vision_tokens@pre_llm"), self.TOKENS)
        assert torch.equal(seen.features, self.TOKENS.features)
        assert redundancy(seen).tolist() == [[-1, 0, -1, 0]]
        alone = apply_view(call("vision_tokens@pre_llm", tile_scope="per_tile"), self.TOKENS)
        assert torch.equal(redundancy(alone), redundancy(self.TOKENS))

    @means("vision_tokens@vision_tower")
    def test_tower_view_scores_tower_features_and_keeps_projected_rows(self) -> None:
        tokens = whole_images(1)
        assert tokens.tower is not None
        # In the tower one token is longer than all others together; after the projector it is not.
        tokens.tower.patches[:, 13] *= 1000
        norm = [{"atom": "visual_token_norm_saliency"}]
        tower = {"tokens": {"atom": "vision_tokens@vision_tower"}}
        changes: dict[str, object] = {
            "/base_policy": {"name": "divprune"},
            "/scoring/signals": norm,
            "/constraints/selector": {"atom": "quality_topk_selector"},
        }
        by_tower = refine(materialize(state({**changes, "/source": tower}), 1), tokens)
        assert by_tower.indices.tolist() == [[13], [13]]
        assert torch.equal(by_tower.features, tokens.features[:, 13:14])
        longer = tokens.features.clone()
        longer[:, 21] *= 1000
        tokens = dataclasses.replace(tokens, features=longer)
        projected = refine(materialize(state(changes), 1), tokens)
        assert projected.indices.tolist() == [[21], [21]]

    def test_a_tower_that_is_not_finite_leaves_the_reference(self) -> None:
        tokens = whole_images(1)
        assert tokens.tower is not None
        tokens.tower.patches[1, 3] = torch.nan
        signals = [{"atom": "spatial_centrality_prior"}]
        tower = {"tokens": {"atom": "vision_tokens@vision_tower"}}
        changes: dict[str, object] = {
            "/base_policy": {"name": "divprune"},
            "/scoring/signals": signals,
            "/source": tower,
        }
        assert refine(materialize(state(changes), 8), tokens).fallback.tolist() == [0, 1]


class TestPriors:
    @means("reference_mask_prior")
    def test_the_reference_counts_in_full_and_all_others_by_the_floor(self) -> None:
        prior = run_prior(call("reference_mask_prior", floor=0.25), known([4, 1]))
        assert prior.tolist() == [[0.25, 1, 0.25, 0.25, 1, 0.25]]

    @means("external_policy")
    def test_a_second_policy_lowers_what_it_does_not_pick(self) -> None:
        tokens = images(2, batch=1)
        picks = BASE_POLICIES["cdpruner"].select(
            BASE_POLICIES["cdpruner"].call.model_validate({"name": "cdpruner"}).params, tokens, 5
        )
        seen = PriorInputs(tokens, DIVPRUNE, 5, torch.arange(5)[None])
        prior = run_prior(call("external_policy", policy="cdpruner", weight=0.75), seen)
        expected = torch.full((1, 36), 0.25)
        expected[0, picks.picks[0]] = 1.0
        assert torch.equal(prior, expected)

    @means("native_teacher_mask_prior")
    def test_the_published_code_lowers_what_it_would_not_keep(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requested: list[int | None] = []

        def published(
            params: BasePolicyParams, tokens: VisualTokens, budget: int | None
        ) -> PublishedSelection:
            requested.append(budget)
            # Two tokens of the first image and a merged row; one token of the second.
            return PublishedSelection((torch.tensor([5, 0, -1]), torch.tensor([2])))

        teacher: BasePolicy = dataclasses.replace(BASE_POLICIES["divprune"], published=published)
        monkeypatch.setitem(BASE_POLICIES, "divprune", teacher)
        seen = PriorInputs(plain(torch.rand(2, 6, 3)), DIVPRUNE, 3, torch.zeros(2, 3).long())
        prior = run_prior(call("native_teacher_mask_prior", weight=0.5), seen)
        assert prior.tolist() == [[1, 0.5, 0.5, 0.5, 0.5, 1], [0.5, 0.5, 1, 0.5, 0.5, 0.5]]
        assert requested == [3]

    def test_priors_multiply_quality_one_after_the_other(self) -> None:
        changes: dict[str, object] = {
            "/scoring/signals": [{"atom": "visual_token_norm_saliency"}],
            "/constraints/selector/q_e": 3,
        }
        once, twice = (
            {"priors": [{"atom": "reference_mask_prior", "floor": 0.5}] * n} for n in (1, 2)
        )
        tokens = images(3)
        plainly = refine(materialize(state(changes), 8), tokens)
        assert plainly.quality is not None
        outside = torch.ones(2, 36, dtype=torch.bool).scatter(1, plainly.reference, False)
        for source, factor in ((once, 0.5), (twice, 0.25)):
            actual = refine(materialize(state({**changes, "/source": source}), 8), tokens)
            assert actual.quality is not None
            assert torch.allclose(actual.quality[outside], factor * plainly.quality[outside])
            assert torch.equal(actual.quality[~outside], plainly.quality[~outside])


@means(*(f"fixed_budget@{k}" for k in FIXED_BUDGETS))
@pytest.mark.parametrize("k", FIXED_BUDGETS)
def test_each_budget_is_the_number_in_its_name(k: int) -> None:
    assert materialize(state({"/budget": {"atom": f"fixed_budget@{k}"}})).budget == k


def test_tiles_share_evenly_and_the_first_take_the_rest() -> None:
    assert split_over_tiles(160, 5) == (32, 32, 32, 32, 32)
    assert split_over_tiles(17, 5) == (4, 4, 3, 3, 3)
    assert split_over_tiles(2, 5) == (1, 1, 0, 0, 0)


@given(budget=st.integers(1, 5000), tiles=st.integers(1, 40))
def test_shares_add_up_and_differ_by_one_at_most(budget: int, tiles: int) -> None:
    shares = split_over_tiles(budget, tiles)
    assert len(shares) == tiles and sum(shares) == budget
    assert shares[0] - shares[-1] <= 1 and list(shares) == sorted(shares, reverse=True)


@means("ratio_budget")
@pytest.mark.parametrize(
    ("ratio", "tokens", "kept"),
    [
        (0.1, 576, 57),
        (0.3, 100, 30),  # 0.3 x 100 is 29.99... in binary fractions
        (0.25, 2880, 640),  # the ceiling
        (0.01, 576, 16),  # the floor
        (1.0, 500, 500),
    ],
)
def test_a_ratio_of_the_tokens_rounded_down(ratio: float, tokens: int, kept: int) -> None:
    assert run_budget(call("ratio_budget", ratio=ratio), tokens) == kept
    assert materialize(state({"/budget": {"atom": "ratio_budget", "ratio": ratio}})).tokens_kept(
        tokens
    ) == min(kept, tokens)


@means("per_tile_budget")
def test_budget_per_tile_is_limited_by_the_ceiling() -> None:
    budget = call("per_tile_budget", k=40, ceiling=100)
    assert [run_budget(budget, 576 * t, t) for t in (1, 2, 3, 5)] == [40, 80, 100, 100]


def test_ceiling_wins_over_a_higher_floor() -> None:
    crossed = call("ratio_budget", floor=64, ceiling=32)
    assert run_budget(crossed, 576) == 32 and crossed.range() == (32, 32)


RATIO: dict[str, object] = {
    "/budget": {"atom": "ratio_budget", "ratio": 0.25, "floor": 4, "ceiling": 64}
}


class TestVarying:
    """A budget that follows the size of an image."""

    def test_the_policy_of_a_size_is_the_policy_at_that_budget(self) -> None:
        policy = materialize(state(RATIO))
        assert (policy.varies, policy.budget) == (True, 64)
        assert policy.at(100) == materialize(state(RATIO), 25)
        assert [policy.tokens_kept(n) for n in (3, 8, 100, 5000)] == [3, 4, 25, 64]

    def test_another_budget_is_fixed(self) -> None:
        policy = materialize(state(RATIO), 10)
        assert not policy.varies and policy.at(576) is policy and policy.tokens_kept(576) == 10

    def test_tiles_count(self) -> None:
        changes: dict[str, object] = {"/budget": {"atom": "per_tile_budget", "k": 3}}
        policy = materialize(state(changes))
        assert policy.tokens_kept(100, 5) == 15 and policy.tokens_kept(100) == 3

    def test_limits_apply_to_the_largest_k_and_r_min_to_the_smallest(self) -> None:
        low: dict[str, object] = {"/budget": {"atom": "ratio_budget", "ceiling": 64, "limit": 63}}
        with pytest.raises(StateError, match="limit 63 is below the state's own K = 64"):
            state(low)
        with pytest.raises(StateError, match="r_min = 5 reference tokens cannot be kept of K = 4"):
            state({**RATIO, "/constraints/selector/r_min": 5})
        with pytest.raises(BudgetError):
            materialize(state({**RATIO, "/constraints/selector/r_min": 4}), 3)


SELECTOR = "reference_residual_exchange_selector"
BY_DIVPRUNE = {"/base_policy": {"name": "divprune"}}
BLIND = {"/scoring/signals": [{"atom": "spatial_centrality_prior"}]}
SILENT = {f"/scoring/signals/{i}/weight": 0.0 for i in range(5)}
FIXED = {"/constraints/selector/q_e": 0}


@pytest.mark.parametrize(
    ("budget", "quota", "r_min"), [(1, 1, 0), (2, 2, 0), (3, 2, 1), (640, 2, 638)]
)
def test_another_budget_changes_only_dependent_fields(budget: int, quota: int, r_min: int) -> None:
    policy = materialize(state(), budget)
    assert (policy.budget, policy.quota, policy.r_min) == (budget, quota, r_min)
    assert policy.state == state()


def test_r_min_that_the_state_sets_holds_at_every_budget() -> None:
    chosen = state({"/constraints/selector": {"atom": SELECTOR, "q_e": 30, "r_min": 10}})
    assert [materialize(chosen, k).quota for k in (10, 12, 40, 64)] == [0, 2, 30, 30]
    assert {materialize(chosen, k).r_min for k in (10, 12, 40, 64)} == {10}


@pytest.mark.parametrize("budget", [0, -1, True, False, 1.5, 32.0, "32", MAX_BUDGET + 1])
def test_a_budget_is_a_whole_number_of_tokens(budget: Any) -> None:
    with pytest.raises(BudgetError) as raised:
        materialize(state(), budget)
    (problem,) = raised.value.problems
    assert problem.where == "/budget" and repr(budget) in problem.what
    assert problem.fix == "give a whole number from 1 to 65536"


@pytest.mark.parametrize(
    ("changes", "budget", "where", "fix"),
    [
        ({"/budget/limit": 64}, 65, "/budget/limit", "use 64 or less"),
        (
            {"/constraints/selector/r_min": 20},
            19,
            "/constraints/selector/r_min",
            "set it to null, which means K - q_e, or use a larger K",
        ),
    ],
)
def test_budget_error_has_pointer_and_fix(
    changes: dict[str, object], budget: int, where: str, fix: str
) -> None:
    with pytest.raises(BudgetError, match="'sample'") as raised:
        materialize(state(changes), budget)
    (problem,) = raised.value.problems
    assert (problem.where, problem.fix) == (where, fix)


def test_limits_are_inclusive() -> None:
    chosen = state({"/budget/limit": 64, "/constraints/selector/r_min": 16})
    assert [materialize(chosen, k).budget for k in (16, 64)] == [16, 64]
    assert materialize(state(), MAX_BUDGET).budget == MAX_BUDGET


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {"instruction", "cls_attention"}),
        (FIXED, {"instruction"}),  # without exchange only the base policy reads anything
        (SILENT, {"instruction"}),
        (BY_DIVPRUNE, {"instruction", "cls_attention"}),
        ({**BY_DIVPRUNE, "/scoring/signals/0/weight": 0.0}, {"cls_attention"}),
        ({**BY_DIVPRUNE, "/scoring/signals/1/weight": 0.0}, {"instruction"}),
        ({**BY_DIVPRUNE, **BLIND}, set()),
        ({**BY_DIVPRUNE, **SILENT}, set()),
        ({**BY_DIVPRUNE, **FIXED}, set()),
    ],
)
def test_a_policy_needs_what_it_reads(changes: dict[str, object], needs: set[str]) -> None:
    policy = materialize(state(changes))
    assert policy.needs == needs
    assert policy.reads_instruction == ("instruction" in needs)


@means("fallback_to_selection")
def test_fallback_requires_the_atom_in_the_state() -> None:
    assert materialize(state()).falls_back
    assert not materialize(state({"/safety": ["preserve_budget"]})).falls_back
