"""Cost model: covers every atom, is monotonic in the work, and ranks states as measured."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, PruningState, StateError, load_state, materialize, refine
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.cost import (
    DEFAULT_COST,
    REFERENCE,
    Shape,
    atom_costs,
    require_affordable,
    state_cost,
)
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS


@pytest.mark.parametrize("name", shipped_states())
def test_shipped_states_are_far_below_the_bound(name: str) -> None:
    assert 2 * state_cost(load_state(name)) < DEFAULT_COST


def test_every_atom_has_a_cost() -> None:
    changes: list[dict[str, object]] = [
        {"/constraints/selector": {"atom": name}} for name in ATOMS.names("selection_constraints")
    ]
    pools = [name for name in ATOMS.names("candidate_pool") if name.endswith("_builder")]
    changes += [{"/constraints/pool": [{"atom": name}]} for name in pools]
    for one in [*map(load_state, shipped_states()), *map(state, changes)]:
        costs = atom_costs(one)
        assert all(cost.milliseconds > 0 for cost in costs), one
        assert state_cost(one) == sum(cost.milliseconds for cost in costs)
    for signal in ATOMS.names("scoring"):
        assert state_cost(state({"/scoring/signals": [{"atom": signal}]})) > 0
    for name in ATOMS.names("reassembly"):
        field = "margin" if "margin" in ATOMS[name].call.model_fields else "strength"
        working = state({"/reassembly": {"atom": name, field: 0.5}})
        assert state_cost(working) > state_cost(state()), name
    for base in BASE_POLICIES:
        prior = {"atom": "external_policy", "policy": base}
        assert state_cost(state({"/source/priors": [prior]})) > state_cost(state()), base


GROWING: list[tuple[str, Any, Any]] = [
    ("/scoring/signals/0/weight", 0.0, 0.5),
    ("/scoring/signals/4/radius", 1, 3),
    ("/constraints/pool/1/pool_ratio", 0.25, 2.0),
    (
        "/constraints/selector",
        {"atom": "maximal_marginal_relevance_pool_selector", "q_e": 2},
        {"atom": "maximal_marginal_relevance_pool_selector", "q_e": 100},
    ),
    (
        "/scoring/signals/0",
        {"atom": "cluster_centroid_representativeness", "clusters": 4},
        {"atom": "cluster_centroid_representativeness", "clusters": 64},
    ),
]


@pytest.mark.parametrize(("pointer", "less", "more"), GROWING, ids=lambda value: str(value)[:30])
def test_more_work_costs_more(pointer: str, less: Any, more: Any) -> None:
    assert state_cost(state({pointer: less})) < state_cost(state({pointer: more}))


def test_large_r_min_does_not_reduce_the_cost() -> None:
    """At the K of the check nothing can be exchanged, but requests may ask for a larger one."""
    selector = {"atom": "reference_residual_exchange_selector", "q_e": 640, "r_min": 200}
    signals = [{"atom": "cluster_centroid_representativeness", "clusters": 64}] * 32
    hidden = state(
        {
            "/scoring/signals": signals,
            "/constraints/selector": selector,
            "/budget/atom": "fixed_budget@640",
        }
    )
    assert state_cost(hidden) > 2 * state_cost(state())


def test_a_larger_image_costs_more() -> None:
    assert state_cost(state(), Shape(tokens=2880)) > 4 * state_cost(state())


def test_the_refusal_names_the_sum_the_bound_and_the_dearest_atoms() -> None:
    require_affordable(state(), DEFAULT_COST)
    signals = [{"atom": "local_detail_energy", "radius": 3, "weight": 1.0}] * 32
    with pytest.raises(StateError) as caught:
        require_affordable(state({"/scoring/signals": signals}), 100.0)
    (problem,) = caught.value.problems
    assert "may take 100" in problem.what
    assert "32 x local_detail_energy" in problem.what
    assert "--autoprune-request-cost" in str(caught.value)


def measured(one: PruningState, shape: Shape) -> float:
    policy, taken = materialize(one, shape.budget), []
    for seed in range(4):
        tokens = images(seed, batch=1, grid=Grid(24, 24), width=shape.width)
        begun = time.process_time()
        refine(policy, tokens)
        taken.append(time.process_time() - begun)
    return min(taken) * 1e3


def test_predicted_ranking_equals_the_measured_one() -> None:
    """Three states, each predicted to cost at least twice the one before it."""
    shape = Shape(REFERENCE.tokens, 64, width=64, tower=64)
    clusters = {"atom": "cluster_centroid_representativeness", "clusters": 64, "weight": 0.5}
    capped = {"atom": "constrained_pool_dpp_selector", "q_e": 64}
    ranked = [
        state(),
        state({"/scoring/signals": [clusters] * 4}),
        state({"/scoring/signals": [clusters] * 32, "/constraints/selector": capped}),
    ]
    predicted = [state_cost(one, shape) for one in ranked]
    assert all(2 * a <= b for a, b in pairwise(predicted)), predicted
    times = [measured(one, shape) for one in ranked]
    assert times == sorted(times), (predicted, times)


def test_a_core_costs_its_policy_and_its_cover() -> None:
    def cost(**core: object) -> float:
        return state_cost(state({"/core": {"share": 0.5, **core}}))

    assert state_cost(state()) < cost() < cost(cover=0.5) < cost(cover=0.5, strength=0.25)
    places = {part.where for part in atom_costs(state({"/core": {"share": 0.5, "cover": 0.5}}))}
    assert {"/core/policy", "/core/cover", "/base_policy"} <= places


def test_a_state_that_is_all_core_costs_the_core_alone() -> None:
    (only,) = atom_costs(state({"/core": {"share": 1.0}}))
    assert only.where == "/core/policy"
