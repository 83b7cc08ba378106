from __future__ import annotations

from random import Random

import pytest

from offline_search.candidates.ablation import ablate, state_components
from offline_search.candidates.components import feature_names
from offline_search.candidates.proposal import assemble_state
from offline_search.candidates.search_space import RandomSource, sample_proposal
from offline_search.settings import Settings
from offline_search.strategies.start_states import base_state
from tests.offline_search.replies import BUDGET
from vllm_autoprune import materialize
from vllm_autoprune.tpdsl.registry import ATOMS, Component

COMPONENTS: tuple[Component, ...] = ("anchoring", "fusion", "diversity")
CANDIDATES = 1000


@pytest.mark.parametrize("component", COMPONENTS)
def test_no_candidate_of_an_ablation_has_the_component(component: Component) -> None:
    settings = Settings(budgets=(BUDGET,), without=(component,))
    others = set[Component]()
    for seed in range(CANDIDATES):
        proposal = sample_proposal(RandomSource(Random(seed)), BUDGET)
        state = assemble_state(proposal, settings)
        present = state_components(state, BUDGET)
        assert component not in present, (seed, sorted(feature_names(state)))
        others |= present
    assert others == set(COMPONENTS) - {component}, "an ablation removes one component only"


def test_removing_all_components_leaves_the_best_by_one_signal() -> None:
    settings = Settings(budgets=(BUDGET,), without=COMPONENTS)
    for seed in range(100):
        state = assemble_state(sample_proposal(RandomSource(Random(seed)), BUDGET), settings)
        assert not state_components(state, BUDGET)
        assert state.constraints.selector.atom == "quality_topk_selector"


def test_without_anchoring_a_dpp_chooses_from_the_pool_of_the_candidate() -> None:
    settings = Settings(budgets=(BUDGET,), without=("anchoring",))
    for seed in range(200):
        proposal = sample_proposal(RandomSource(Random(seed)), BUDGET)
        free = assemble_state(proposal, settings)
        anchored = assemble_state(proposal, settings.model_copy(update={"without": ()}))
        assert free.constraints.pool == anchored.constraints.pool
        policy = materialize(free, BUDGET)
        assert (policy.quota, policy.r_min) == (BUDGET, 0)
        assert free.constraints.selector.atom.endswith("dpp_selector")


def test_diverse_selectors_and_pools_say_so() -> None:
    diverse = {name for name in ATOMS.names() if "diversity" in ATOMS[name].components}
    selectors = set(ATOMS.names("selection_constraints"))
    compared = {name for name in selectors if "dpp" in name or "marginal" in name}
    assert compared | {"reference_strict_margin_exchange_selector"} == diverse & selectors
    assert "diversity_pool_builder" in diverse and "quality_pool_builder" not in diverse


@pytest.mark.parametrize("seed", range(10))
def test_a_fixed_quota_is_that_of_every_candidate(seed: int) -> None:
    settings = Settings(budgets=(BUDGET,), quota=3)
    body = sample_proposal(RandomSource(Random(seed)), BUDGET)
    assert "q_e=3" in feature_names(assemble_state(body, settings))


@pytest.mark.parametrize(
    "odd", [{}, {"scoring": 3}, {"constraints": []}, {"constraints": {"selector": "x"}}]
)
def test_ablation_leaves_malformed_input_to_the_loader(odd: dict[str, object]) -> None:
    settings = Settings(without=COMPONENTS, quota=2)
    assert ablate(odd, settings) is not None  # type: ignore[arg-type]


def test_ablation_does_not_change_the_base_policy() -> None:
    settings = Settings(budgets=(BUDGET,))
    for changes in ({"quota": 4}, {"without": ("anchoring",)}, {"without": ("fusion",)}):
        state = base_state(settings.model_copy(update=changes))
        assert materialize(state, BUDGET).quota == 0
