"""The search space as choices, its smaller spaces, and the first states of a search."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import pytest

from offline_search.candidates import assemble_state, base_state, nearest_state
from offline_search.choices import ClippedChoices, RandomSource
from offline_search.components import JsonObject, components_json, structure
from offline_search.search_space import choices_of_state, sample_proposal
from offline_search.settings import MAX_QUOTA, Settings, Space
from offline_search.strategies.sampling import _warm_start_states
from tests.offline_search.synthetic import BUDGET
from tests.tables import parametrize_from_file
from vllm_autoprune import PruningState, load_state, materialize, safety_check
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

PLAIN = Settings(budgets=(BUDGET,))
SPACES: list[Space] = [space for space in get_args(Space) if space != "all"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "core": {"core": True},
    "rank": {"rank_at": True},
    "bases": {"other_bases": ("dart", "divprune")},
    "paper": {"library": "paper"},
    "share": {"budgets": ("1/8",)},
    "everything": {
        "core": True,
        "rank_at": True,
        "other_bases": ("dart",),
        "budgets": (23,),
    },
    **{space: {"space": space, "core": True} for space in SPACES},
}


def settings_of(name: str) -> Settings:
    return Settings.model_validate({"budgets": (BUDGET,), **OPTIONS[name]})


def draw(settings: Settings, seed: int) -> JsonObject:
    return sample_proposal(RandomSource(Random(seed)), settings)


def features(state: PruningState) -> set[str]:
    """Atoms and q_e of a state."""
    quota = state.constraints.selector.model_dump().get("q_e")
    return {*structure(state)} | ({f"q_e={quota}"} if quota is not None else set())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_choices_of_a_state_reproduce_it(name: str) -> None:
    settings = settings_of(name)
    for seed in range(30):
        state = assemble_state(draw(settings, seed), settings)
        origins = {
            ATOMS[name].origin for name in set(structure(state)) & set(ATOMS.names())
        }
        assert name != "paper" or "extension" not in origins
        again = sample_proposal(
            ClippedChoices(choices_of_state(state, settings)), settings
        )
        assert assemble_state(again, settings).digest == state.digest
    if settings.space == "all":  # other states are approximated
        for state in (*_warm_start_states(settings), base_state(settings)):
            near = sample_proposal(
                ClippedChoices(choices_of_state(state, settings)), settings
            )
            assert features(assemble_state(near, settings)) == features(state)


def test_every_searched_atom_is_sampled() -> None:
    drawn: set[str] = set()
    for seed in range(600):
        drawn |= features(assemble_state(draw(PLAIN, seed), PLAIN))
    for group in (
        "scoring",
        "score_fusion",
        "similarity_kernel",
        "selection_constraints",
    ):
        assert {name for name in ATOMS.names(group) if not ATOMS[name].videos} <= drawn
    assert not any(ATOMS[name].videos for name in drawn & set(ATOMS.names()))
    assert set(ATOMS.names("reassembly")) <= drawn
    assert {f"q_e={quota}" for quota in (0, 1, 2, 4, 8)} <= drawn


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("core", "core", {None, *CORE_POLICIES}),
        ("rank", "rank_at", {"merger_in", "merger_out"}),
        ("bases", "base_policy", {"cdpruner", "dart", "divprune"}),
    ],
)
def test_optional_components_leave_the_other_choices_as_they_are(
    name: str, field: str, values: set[str | None]
) -> None:
    settings = settings_of(name)
    drawn = set()
    for seed in range(200):
        proposal = draw(settings, seed)
        assert {key: part for key, part in proposal.items() if key != field} == draw(
            PLAIN, seed
        )
        plain = assemble_state(proposal, PLAIN)
        assert (plain.core, plain.rank_at) == (None, "merger_out"), (
            "they are not searched"
        )
        state = assemble_state(proposal, settings)
        places = {
            "core": state.core and state.core.policy.name,
            "rank_at": state.rank_at,
            "base_policy": state.base_policy.name,
        }
        drawn.add(places[field])
    assert drawn == values


@parametrize_from_file("more")
def test_warm_starts_differ_are_safe_and_use_the_settings(more: dict[str, Any]) -> None:
    settings = Settings(**{"base_policy": "divprune", "budgets": (BUDGET,), **more})
    states = _warm_start_states(settings)
    budget = settings.source_budget
    for state in (base_state(settings), *states):
        assert state.base_policy.name == "divprune"
        assert safety_check(materialize(state, budget)).valid
    assert not materialize(base_state(settings), budget).refines
    assert len({state.digest for state in states}) == len(states)
    shares = [state.core.share for state in states if state.core]
    assert shares == ([0.5, 0.75] if settings.core else [])
    places = [state.rank_at for state in states]
    assert places.count("merger_in") == settings.rank_at


def test_every_signal_starts_alone_and_may_exchange_everything() -> None:
    settings = Settings(base_policy="divprune", budgets=(BUDGET,))
    states = _warm_start_states(settings)
    alone = [state for state in states if len(state.scoring.signals) == 1]
    signals = [name for name in ATOMS.names("scoring") if not ATOMS[name].videos]
    assert [state.scoring.signals[0].atom for state in alone] == signals
    quotas = {state.constraints.selector.bounds(BUDGET)[0] for state in alone}
    assert quotas == {BUDGET}
    rests = {structure(state)[1:] for state in alone}
    assert len(rests) == 1, "only their signal differs"


@pytest.mark.parametrize("budget", [640, 720, 2880])
def test_quotas_are_within_the_language_at_large_budgets(budget: int) -> None:
    settings = Settings(budgets=(budget,), strategy="random")
    for state in _warm_start_states(settings):
        assert state.budget.range() == (budget, budget)
    drawn = [assemble_state(draw(settings, seed), settings) for seed in range(60)]
    quotas = {state.constraints.selector.model_dump().get("q_e") for state in drawn}
    assert max(quota for quota in quotas if quota is not None) == 640


# ---- smaller spaces ----

RELEASED = {call.atom for call in load_state("autoprune").scoring.signals}


@pytest.mark.parametrize("space", SPACES)
def test_every_state_has_a_nearest_one_in_a_space_whose_own_stay(space: Space) -> None:
    ablated = {"strength": (0.0005, 0.0005), "q_e": (2, 2), "keep_weight": (0, 0.6)}
    # Bounds of numbers by docs/search.md, and how many of the released signals a state has.
    inside: dict[Space, tuple[dict[str, tuple[float, float]], set[int]]] = {
        "numbers": ({"q_e": (0, 3), "lam": (0.04, 0.22), "power": (0.7, 1.5)}, {5}),
        "released": (
            {"q_e": (0, 3), "strength": (0, 0.006), "bias": (0.35, 0.95)},
            {1, 2, 3, 4, 5},
        ),
        "without-diversity": (ablated | {"lam": (0, 0)}, {1, 2, 3, 4, 5}),
        "without-fusion": (ablated | {"lam": (0.05, 0.5), "power": (0.5, 1.8)}, {1}),
        "without-anchoring": (
            ablated | {"q_e": (MAX_QUOTA, MAX_QUOTA), "keep_weight": (0, 0)},
            {1, 2, 3, 4, 5},
        ),
    }

    def is_inside(state: PruningState, space: Space) -> bool:
        signals = state.scoring.signals
        (ranges, counts) = inside[space]
        values = dict(state.constraints.selector) | dict(state.reassembly)
        for call in signals:
            values |= {"bias": dict(call)["bias"]} if "bias" in dict(call) else {}
        within = all(
            low <= values[name] <= high
            for name, (low, high) in ranges.items()
            if name in values
        )
        small = values["q_e"] < 2 or values["strength"] <= 0.003
        return (
            within
            and small
            and len(signals) in counts
            and values["r_min"] is None
            and {call.atom for call in signals} <= RELEASED
        )

    settings = Settings(budgets=(BUDGET,), space=space)
    states = [
        assemble_state(draw(settings, seed), PLAIN) for seed in range(100)
    ]  # as drawn
    for seed, state in enumerate(states):
        assert is_inside(state, space), seed
        assert assemble_state(components_json(state), settings).digest == state.digest
        assert is_inside(nearest_state(draw(PLAIN, seed), settings), space), seed
    assert len({state.digest for state in states}) > 75
    assert all(is_inside(state, space) for state in _warm_start_states(settings))
    atoms = {call.atom for state in states for call in state.scoring.signals}
    assert len(atoms) == (4 if space == "without-fusion" else 5)
