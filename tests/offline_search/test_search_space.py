from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import pytest

from offline_search.candidates import assemble_state, base_state, paper_state, warm_start_states
from offline_search.components import (
    JsonObject,
    atom_calls,
    components_json,
    structure,
)
from offline_search.ledger import ProposalRecord
from offline_search.search_space import (
    Choice,
    ChoiceSource,
    RandomSource,
    choices_of_state,
    numbers_at_upper_end,
    sample_proposal,
)
from offline_search.settings import MAX_QUOTA, Settings, Space
from tests.offline_search.synthetic import BUDGET, Searches, valid_replies
from vllm_autoprune import PruningState, load_state, materialize, safety_check
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.transfer import list_changes

PLAIN = Settings(budgets=(BUDGET,))
SPACES: list[Space] = [space for space in get_args(Space) if space != "all"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "core": {"core": True},
    "rank": {"rank_at": True},
    "bases": {"other_bases": ("dart", "divprune")},
    "paper": {"library": "paper"},
    "everything": {"core": True, "rank_at": True, "other_bases": ("dart",), "budgets": (23,)},
    **{space: {"space": space, "core": True} for space in SPACES},
}


def settings_of(name: str) -> Settings:
    return Settings.model_validate({"budgets": (BUDGET,), **OPTIONS[name]})


def draw(settings: Settings, seed: int) -> JsonObject:
    return sample_proposal(RandomSource(Random(seed)), settings)


class BoundSource:
    """Always chooses the first option and the lower bound, or the last and the upper one."""

    def __init__(self, upper: bool) -> None:
        self._upper = upper

    def option(self, name: str, options: Sequence[str]) -> str:
        return options[-self._upper]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        return high if self._upper else low


class FixedSource:
    """Returns given choices and fails on any other."""

    def __init__(self, choices: dict[str, Choice]) -> None:
        self._choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        assert self._choices[name] in options, name
        return str(self._choices[name])

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        value = self._choices[name]
        assert isinstance(value, int | float) and low <= value <= high, name
        return value


def features(state: PruningState) -> set[str]:
    """Atoms and q_e of a state."""
    quota = state.constraints.selector.model_dump().get("q_e")
    return {*structure(state)} | ({f"q_e={quota}"} if quota is not None else set())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_choices_of_a_sampled_state_reproduce_it(name: str) -> None:
    settings = settings_of(name)
    sources: list[ChoiceSource] = [BoundSource(False), BoundSource(True)]
    for source in (*sources, *(RandomSource(Random(seed)) for seed in range(40))):
        state = assemble_state(sample_proposal(source, settings), settings)
        again = sample_proposal(FixedSource(choices_of_state(state, settings)), settings)
        assert assemble_state(again, settings).digest == state.digest


@pytest.mark.parametrize("name", ["plain", "core", "everything"])
def test_other_states_are_approximated_by_choices(name: str) -> None:
    settings = settings_of(name)
    for state in (*warm_start_states(settings), base_state(settings)):
        near = sample_proposal(FixedSource(choices_of_state(state, settings)), settings)
        assert features(assemble_state(near, settings)) == features(state)


def test_every_searched_atom_is_sampled() -> None:
    drawn: set[str] = set()
    for seed in range(600):
        drawn |= features(assemble_state(draw(PLAIN, seed), PLAIN))
    for group in ("scoring", "score_fusion", "similarity_kernel", "selection_constraints"):
        assert set(ATOMS.names(group)) <= drawn
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
    settings, drawn = settings_of(name), set()
    for seed in range(200):
        proposal = draw(settings, seed)
        assert {key: part for key, part in proposal.items() if key != field} == draw(PLAIN, seed)
        plain = assemble_state(proposal, PLAIN)
        assert (plain.core, plain.rank_at) == (None, "merger_out"), "they are not searched"
        state = assemble_state(proposal, settings)
        places = {"core": state.core and state.core.policy.name, "rank_at": state.rank_at,
                  "base_policy": state.base_policy.name}  # fmt: skip
        drawn.add(places[field])
    assert drawn == values


def test_samplers_draw_no_extension_from_the_library_of_the_paper() -> None:
    settings = settings_of("paper")
    for seed in range(40):
        calls = atom_calls(assemble_state(draw(settings, seed), settings))
        assert "extension" not in {ATOMS[call.atom].origin for call in calls}


def test_numbers_at_the_upper_end_are_told_with_their_path() -> None:
    state = warm_start_states(settings_of("core"))[1]
    body = json.loads(json.dumps(components_json(state)))
    body["core"]["share"] = body["reassembly"]["strength"] = 1.0
    body["constraints"]["selector"]["q_e"] = MAX_QUOTA
    upper = dict(numbers_at_upper_end(body))
    assert upper == {"core/share": 1.0, "reassembly/strength": 1.0}


@pytest.mark.parametrize(
    "more",
    [{}, {"budgets": (2,)}, {"space": "numbers"}, {"space": "without-fusion"}, {"core": True},
     {"rank_at": True}],
    ids=str,
)  # fmt: skip
def test_warm_starts_differ_are_safe_and_use_the_settings(more: dict[str, Any]) -> None:
    settings = Settings(**{"base_policy": "divprune", "budgets": (BUDGET,), **more})
    states, budget = warm_start_states(settings), settings.source_budget
    for state in (base_state(settings), *states):
        assert state.base_policy.name == "divprune"
        assert safety_check(materialize(state, budget)).valid
    assert not materialize(base_state(settings), budget).refines
    assert len({state.digest for state in states}) == len(states)
    shares = [state.core.share for state in states if state.core]
    assert shares == ([0.5, 0.75] if settings.core else [])
    places = [state.rank_at for state in states]
    assert places.count("merger_in") == settings.rank_at
    if settings.rank_at:
        assert structure(states[0]) != structure(states[1])


def test_every_signal_starts_alone_and_may_exchange_everything() -> None:
    states = [s for s in warm_start_states(PLAIN) if len(s.scoring.signals) == 1]
    assert [state.scoring.signals[0].atom for state in states] == ATOMS.names("scoring")
    assert {state.constraints.selector.bounds(BUDGET)[0] for state in states} == {BUDGET}
    assert len({structure(state)[1:] for state in states}) == 1, "nothing but their signal differs"


@pytest.mark.parametrize("budget", [640, 720, 2880])
def test_quotas_are_within_the_language_at_large_budgets(budget: int) -> None:
    settings = Settings(budgets=(budget,), strategy="random")
    for state in warm_start_states(settings):
        assert state.budget.range() == (budget, budget)
    drawn = [assemble_state(draw(settings, seed), settings) for seed in range(60)]
    quotas = {state.constraints.selector.model_dump().get("q_e") for state in drawn}
    assert max(quota for quota in quotas if quota is not None) == 640


SELECTOR = "/constraints/selector"
NUMBERS = {
    *(f"{SELECTOR}/{name}" for name in ("q_e", "lam", "keep_weight", "power")),
    "/reassembly/strength",
}


def in_space(space: Space, seed: int) -> PruningState:
    """The state of a random proposal of a smaller space, as it was drawn."""
    return assemble_state(draw(Settings(budgets=(BUDGET,), space=space), seed), PLAIN)


def is_inside(state: PruningState, space: Space) -> bool:
    """Whether a state is of a space, by the text of the released search."""
    data = state.model_dump(mode="json")
    signals = data["scoring"]["signals"]
    # Dumps leave these defaults out.
    selector = {"keep_weight": 0.0, "power": 1.0, **data["constraints"]["selector"]}
    q_e, lam, keep, power = (selector[key] for key in ("q_e", "lam", "keep_weight", "power"))
    strength = data["reassembly"]["strength"]
    bias = [call["bias"] for call in signals if call["atom"] == "spatial_centrality_prior"]
    released = load_state("autoprune").model_dump(mode="json")["scoring"]["signals"]
    known = {call["atom"] for call in signals} <= {call["atom"] for call in released}
    if not known or selector["r_min"] is not None:
        return False
    if space in ("numbers", "released"):
        fixed = signals == released if space == "numbers" else all(0.35 <= b <= 0.95 for b in bias)
        numbers = 0.04 <= lam <= 0.22 and 0.1 <= keep <= 0.8 and 0.7 <= power <= 1.5
        bounds = 0 <= q_e <= 3 and 0 <= strength <= (0.003 if q_e >= 2 else 0.006)
        return fixed and numbers and bounds
    ablated = {
        "without-diversity": lam == 0 and q_e == 2 and keep <= 0.6,
        "without-fusion": len(signals) == 1 and 0.05 <= lam <= 0.5 and q_e == 2 and keep <= 0.6,
        "without-anchoring": (q_e, keep) == (MAX_QUOTA, 0) and 0.05 <= lam <= 0.5,
    }[space]
    free = 0.5 <= power <= 1.8 and all(0.35 <= b <= 0.95 for b in bias)
    return ablated and free and strength == 0.0005


@pytest.mark.parametrize("space", SPACES)
def test_every_proposal_is_put_into_its_space_and_its_own_stay(space: Space) -> None:
    settings = Settings(budgets=(BUDGET,), space=space)
    digests = set()
    for seed in range(200):
        state = in_space(space, seed)
        assert is_inside(state, space), seed
        assert assemble_state(components_json(state), settings).digest == state.digest
        digests.add(state.digest)
        assert is_inside(assemble_state(draw(PLAIN, seed), settings), space), seed
    assert len(digests) > 150
    starts = warm_start_states(settings)
    assert starts and all(is_inside(state, space) for state in starts)


def test_the_numbers_alone_differ_from_the_selected_policy() -> None:
    released, varied = paper_state(PLAIN).model_dump(mode="json"), set()
    for seed in range(50):
        state = in_space("numbers", seed).model_dump(mode="json")
        varied |= {change.where for change in list_changes(released, state)}
    assert varied == NUMBERS


def test_signals_are_free_where_the_space_says_so() -> None:
    spaces: dict[Space, int] = {"released": 5, "without-fusion": 4}
    for space, count in spaces.items():
        states = [in_space(space, seed) for seed in range(100)]
        assert len({call.atom for state in states for call in state.scoring.signals}) == count


@pytest.mark.parametrize("strategy", ["random", "tpe", "autoprune", "autoprune+"])
async def test_every_strategy_stays_in_the_space(strategy: str, search: Searches) -> None:
    await search(valid_replies(30), strategy=strategy, rounds=3, per_round=5, space="released")
    states = [record.state for record in search.records(ProposalRecord) if record.state]
    assert len(states) >= 11
    assert all(is_inside(load_state(body), "released") for body in states)
