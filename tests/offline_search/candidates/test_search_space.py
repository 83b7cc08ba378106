from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from offline_search.candidates import (
    assemble_state,
    base_state,
    paper_state,
    parse_proposal,
    warm_start_states,
)
from offline_search.components import Components, JsonObject, atom_calls, compact_json, structure
from offline_search.prompt import describe_language
from offline_search.schema import proposal_schema
from offline_search.search_space import (
    RandomSource,
    choices_of_state,
    numeric_parameters,
    quota_scale,
    sample_proposal,
)
from offline_search.settings import Settings
from offline_search.strategies.sampling import sample_draft
from tests.offline_search.replies import BUDGET
from vllm_autoprune import materialize, safety_check
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import PruningState


class LowestSource:
    """Always chooses the first option and the lower bound."""

    def option(self, name: str, options: Sequence[str]) -> str:
        return options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        return low


class HighestSource:
    """Always chooses the last option and the upper bound."""

    def option(self, name: str, options: Sequence[str]) -> str:
        return options[-1]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        return high


@pytest.mark.parametrize(
    "source", [LowestSource(), HighestSource(), *(RandomSource(Random(s)) for s in range(30))]
)
def test_every_sampled_proposal_is_a_valid_state(source: RandomSource, settings: Settings) -> None:
    assert assemble_state(sample_proposal(source, BUDGET), settings).scoring.signals


def list_features(state: PruningState) -> set[str]:
    """Atoms and q_e of a state."""
    quota = state.constraints.selector.model_dump().get("q_e")
    return {*structure(state)} | ({f"q_e={quota}"} if quota is not None else set())


def test_every_searched_atom_is_sampled(settings: Settings) -> None:
    drawn: set[str] = set()
    for seed in range(600):
        drawn |= list_features(
            assemble_state(sample_proposal(RandomSource(Random(seed)), BUDGET), settings)
        )
    for group in ("scoring", "score_fusion", "similarity_kernel", "selection_constraints"):
        assert set(ATOMS.names(group)) <= drawn
    assert set(ATOMS.names("reassembly")) <= drawn
    assert {f"q_e={quota}" for quota in (0, 1, 2, 4, 8)} <= drawn


def test_the_numbers_of_a_state_have_their_values_and_bounds(settings: Settings) -> None:
    state = paper_state(settings)
    numbers = numeric_parameters(state)
    values = {parameter.name: value for parameter, value in numbers.items()}
    assert values["scoring/signals/0/weight"] == 0.28
    assert values["constraints/selector/q_e"] == 2
    assert [parameter.path[-1] for parameter in numbers if parameter.is_quota] == ["q_e"]
    assert all(parameter.low <= value <= parameter.high for parameter, value in numbers.items())


def with_lowest_numbers(state: PruningState) -> JsonObject:
    """The components of a state with all numeric parameters at their lower bound."""
    components: Any = Components.from_state(state).to_json()
    for parameter in numeric_parameters(state):
        *path, name = parameter.path
        part = components
        for step in path:
            part = part[step]
        part[name] = parameter.low
    body: JsonObject = components
    return body


@pytest.mark.parametrize("seed", range(8))
def test_lower_bounds_are_valid_and_keep_the_structure(seed: int, settings: Settings) -> None:
    state = assemble_state(sample_proposal(RandomSource(Random(seed)), BUDGET), settings)
    assert structure(assemble_state(with_lowest_numbers(state), settings)) == structure(state)


class FixedSource(LowestSource):
    """Returns given choices and fails on any other."""

    def __init__(self, choices: dict[str, float | str]) -> None:
        self.choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        assert self.choices[name] in options, name
        return str(self.choices[name])

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        value = self.choices[name]
        assert isinstance(value, int | float) and low <= value <= high, name
        return value


@pytest.mark.parametrize("seed", range(40))
def test_the_choices_of_a_sampled_state_reproduce_it(seed: int, settings: Settings) -> None:
    state = assemble_state(sample_proposal(RandomSource(Random(seed)), BUDGET), settings)
    again = sample_proposal(FixedSource(choices_of_state(state, BUDGET)), BUDGET)
    assert assemble_state(again, settings).digest == state.digest


def test_other_states_are_approximated_by_choices(settings: Settings) -> None:
    for state in (*warm_start_states(settings), base_state(settings)):
        near = assemble_state(
            sample_proposal(FixedSource(choices_of_state(state, BUDGET)), BUDGET), settings
        )
        assert list_features(near) == list_features(state)


def test_fixed_parameters_are_not_searched(settings: Settings) -> None:
    names = {str(parameter.path[-1]) for parameter in numeric_parameters(paper_state(settings))}
    assert names & {"eps", "r_min", "iters"} == set()


@pytest.mark.parametrize(
    "more", [{}, {"budgets": (2,)}, {"space": "numbers"}, {"space": "without-fusion"}], ids=str
)
def test_warm_starts_differ_are_safe_and_use_the_settings(more: dict[str, Any]) -> None:
    settings = Settings(**{"base_policy": "divprune", "budgets": (BUDGET,), **more})
    budget = settings.source_budget
    for state in (base_state(settings), *warm_start_states(settings)):
        assert state.base_policy.name == "divprune"
        assert safety_check(materialize(state, budget)).valid
    assert not materialize(base_state(settings), budget).refines
    assert len({state.digest for state in warm_start_states(settings)}) == len(
        warm_start_states(settings)
    )


class TestCore:
    """A search of cores: the same choices as without, and at the end those of the core."""

    @pytest.fixture
    def split(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"core": True})

    @pytest.mark.parametrize("seed", range(20))
    def test_other_choices_are_those_of_a_search_without(self, seed: int) -> None:
        without = sample_proposal(RandomSource(Random(seed)), BUDGET)
        split = sample_proposal(RandomSource(Random(seed)), BUDGET, core=True)
        assert {name: part for name, part in split.items() if name != "core"} == without
        assert "core" not in without

    @pytest.mark.parametrize("source", [LowestSource(), HighestSource()])
    def test_bounds_are_valid(self, source: LowestSource, split: Settings) -> None:
        assert assemble_state(sample_proposal(source, BUDGET, core=True), split).scoring.signals

    def test_every_core_policy_is_sampled(self, split: Settings) -> None:
        drawn: set[str] = set()
        for seed in range(200):
            proposal = sample_proposal(RandomSource(Random(seed)), BUDGET, core=True)
            state = assemble_state(proposal, split)
            drawn.add("none" if state.core is None else state.core.policy.name)
            near = FixedSource(choices_of_state(state, BUDGET, core=True))
            again = assemble_state(sample_proposal(near, BUDGET, core=True), split)
            assert again.digest == state.digest
        assert drawn == {"none", *CORE_POLICIES}

    def test_the_numbers_of_a_core_are_tuned(self, split: Settings) -> None:
        state = warm_start_states(split)[1]
        assert state.core is not None and state.core.share == 0.5
        names = {parameter.name for parameter in numeric_parameters(state)}
        assert {"core/share", "core/cover", "core/strength"} <= names
        lowest = assemble_state(with_lowest_numbers(state), split)
        assert lowest.core is not None and lowest.core.share == 0.01
        assert structure(lowest) == structure(state)
        assert "core=divprune" in list_features(state)

    def test_a_search_without_cores_drops_a_proposed_one(self, settings: Settings) -> None:
        proposal = sample_proposal(RandomSource(Random(0)), BUDGET)
        proposal["core"] = {"share": 0.5}
        assert assemble_state(proposal, settings).core is None
        assert all(state.core is None for state in warm_start_states(settings))

    def test_warm_starts_are_safe(self, split: Settings) -> None:
        states = warm_start_states(split)
        assert [state.core.share for state in states if state.core] == [0.5, 0.75]
        assert all(safety_check(materialize(state, BUDGET)).valid for state in states)


class TestRankAt:
    """A search of where tokens are ranked: the other choices are those of a search without."""

    @pytest.fixture
    def ranking(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"rank_at": True})

    def test_both_places_are_drawn_and_other_choices_stay(self, ranking: Settings) -> None:
        drawn = set()
        for seed in range(20):
            without = sample_proposal(RandomSource(Random(seed)), BUDGET)
            proposal = sample_proposal(RandomSource(Random(seed)), BUDGET, rank_at=True)
            assert {name: part for name, part in proposal.items() if name != "rank_at"} == without
            state = assemble_state(proposal, ranking)
            drawn.add(state.rank_at)
            near = FixedSource(choices_of_state(state, BUDGET, rank_at=True))
            again = assemble_state(sample_proposal(near, BUDGET, rank_at=True), ranking)
            assert again.digest == state.digest
        assert drawn == {"merger_in", "merger_out"}

    def test_a_search_without_it_ranks_after_the_merger(self, settings: Settings) -> None:
        proposal = sample_proposal(RandomSource(Random(0)), BUDGET)
        state = assemble_state({**proposal, "rank_at": "merger_in"}, settings)
        assert state.rank_at == "merger_out"

    def test_proposals_may_say_it_and_are_told_so(
        self, settings: Settings, ranking: Settings
    ) -> None:
        body = {**compact_json(paper_state(settings)), "rank_at": "merger_in"}
        checked = jsonschema.Draft202012Validator(proposal_schema(BUDGET, rank_at=True))
        assert checked.is_valid(body)
        assert not checked.is_valid({**body, "rank_at": "elsewhere"})
        assert not jsonschema.Draft202012Validator(proposal_schema(BUDGET)).is_valid(body)
        assert "merger_in" in describe_language(ranking)
        assert "rank_at" not in describe_language(settings)
        draft = parse_proposal(json.dumps(body), ranking, "llm", ())
        assert draft.state is not None and draft.state.rank_at == "merger_in"
        assert compact_json(draft.state)["rank_at"] == "merger_in"

    def test_one_warm_start_ranks_before_the_merger(
        self, settings: Settings, ranking: Settings
    ) -> None:
        assert [state.rank_at for state in warm_start_states(ranking)].count("merger_in") == 1
        assert {state.rank_at for state in warm_start_states(settings)} == {"merger_out"}

    def test_states_that_rank_elsewhere_have_another_structure(self, ranking: Settings) -> None:
        first, second = warm_start_states(ranking)[:2]
        assert {first.rank_at, second.rank_at} == {"merger_out", "merger_in"}
        assert structure(first) != structure(second)


@pytest.mark.parametrize("budget", [640, 720, 2880])
def test_quotas_are_within_the_language_at_large_budgets(budget: int) -> None:
    settings = Settings(budgets=(budget,), strategy="random")
    assert quota_scale(budget)[-1] == 640
    for state in warm_start_states(settings):
        assert state.budget.range() == (budget, budget)
    for seed in range(20):
        assemble_state(sample_proposal(RandomSource(Random(seed)), budget), settings)


def test_samplers_draw_no_extension_from_the_library_of_the_paper() -> None:
    settings = Settings(budgets=(BUDGET,), strategy="random", library="paper")
    for seed in range(40):
        source = RandomSource(Random(seed))
        state = sample_draft("random", source, settings).state
        assert state is not None
        assert "extension" not in {ATOMS[call.atom].origin for call in atom_calls(state)}


def test_every_signal_starts_alone_and_may_exchange_everything(settings: Settings) -> None:
    states = [one for one in warm_start_states(settings) if len(one.scoring.signals) == 1]
    assert [one.scoring.signals[0].atom for one in states] == ATOMS.names("scoring")
    assert {one.constraints.selector.bounds(BUDGET)[0] for one in states} == {BUDGET}
    rest = {structure(one)[1:] for one in states}
    assert len(rest) == 1, "they differ in nothing but their signal"
