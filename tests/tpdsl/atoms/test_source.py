from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from tests.tpdsl.atom_policies import means, whole_images
from tests.tpdsl.samples import call, images, plain, state
from vllm_autoprune import Grid, SelectionError, load_state, materialize, refine
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.atoms.source import PriorInputs, apply_view, run_prior
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicy,
    BasePolicyCall,
    BasePolicyParams,
    PublishedSelection,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens

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

    def test_one_tile_is_not_copied(self) -> None:
        tokens = images(1)
        assert apply_view(call("vision_tokens@pre_llm"), tokens) is tokens

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

    def test_a_tower_that_is_missing_is_an_error(self) -> None:
        with pytest.raises(SelectionError, match="tower"):
            apply_view(call("vision_tokens@vision_tower"), images(1))

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

    def test_other_layers_are_refused(self) -> None:
        tower = {"tokens": {"atom": "vision_tokens@vision_tower", "layer": -1}}
        with pytest.raises(StateError, match="/source/tokens/layer"):
            state({"/source": tower})


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

    def test_external_policy_must_be_registered(self) -> None:
        unknown = {"priors": [{"atom": "external_policy", "policy": "nobody"}]}
        with pytest.raises(StateError, match="/source/priors/0/policy"):
            state({"/source": unknown})

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

    def test_floor_of_zero_excludes_all_other_tokens(self) -> None:
        changes: dict[str, object] = {
            "/source": {"priors": [{"atom": "reference_mask_prior"}]},
            "/constraints/selector/q_e": 8,
        }
        assert refine(materialize(state(changes), 8), images(3)).exchanged.tolist() == [0, 0]


class TestInAState:
    def test_a_state_without_source_is_one_with_the_defaults_written_out(self) -> None:
        written = {"tokens": {"atom": "vision_tokens@post_projector"}, "priors": []}
        assert state({"/source": written}).digest == state().digest
        assert json.loads(state().dumps())["source"]["priors"] == []

    def test_a_prior_is_no_view_and_a_view_no_prior(self) -> None:
        for source in (
            {"tokens": {"atom": "reference_mask_prior"}},
            {"priors": [{"atom": "vision_tokens@pre_llm"}]},
        ):
            with pytest.raises(StateError, match="/source"):
                state({"/source": source})

    def test_it_is_part_of_the_digest_and_survives_writing(self) -> None:
        chosen = state({"/source": {"priors": [{"atom": "external_policy", "weight": 0.25}]}})
        assert chosen.digest != state().digest
        assert load_state(chosen.dumps()) == chosen
