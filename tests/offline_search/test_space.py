from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from offline_search.history import parts, structure
from offline_search.proposal import assembled
from offline_search.settings import Settings
from offline_search.space import Dice, composed, knobs, read_choices, read_knobs, turned
from offline_search.strategies.starts import base_state, paper_state, warm_starts
from tests.offline_search.replies import BUDGET
from vllm_autoprune import materialize, safety_check
from vllm_autoprune.tpdsl.registry import ATOMS


class Lowest:
    """Always the first option and the lower bound."""

    def option(self, name: str, options: Sequence[str]) -> str:
        return options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        return low


class Highest:
    """Always the last option and the upper bound."""

    def option(self, name: str, options: Sequence[str]) -> str:
        return options[-1]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        return high


@pytest.mark.parametrize("chooser", [Lowest(), Highest(), *(Dice(Random(s)) for s in range(30))])
def test_every_composition_is_a_state(chooser: Dice, settings: Settings) -> None:
    assert assembled(composed(chooser, BUDGET), settings, "candidate").scoring.signals


def test_every_atom_of_the_searched_components_is_drawn(settings: Settings) -> None:
    drawn: set[str] = set()
    for seed in range(600):
        drawn |= parts(assembled(composed(Dice(Random(seed)), BUDGET), settings, "candidate"))
    for group in ("scoring", "score_fusion", "similarity_kernel", "selection_constraints"):
        assert set(ATOMS.names(group)) <= drawn
    assert set(ATOMS.names("reassembly")) <= drawn
    assert {f"q_e={quota}" for quota in (0, 1, 2, 4, 8)} <= drawn


@pytest.mark.parametrize("seed", range(8))
def test_turning_the_knobs_keeps_the_structure(seed: int, settings: Settings) -> None:
    state = assembled(composed(Dice(Random(seed)), BUDGET), settings, "candidate")
    for chooser in (Lowest(), Highest(), Dice(Random(seed))):
        made = assembled(turned(state, chooser, BUDGET), settings, "candidate")
        assert structure(made) == structure(state)


def test_what_was_read_off_is_what_was_turned(settings: Settings) -> None:
    state = paper_state(settings)
    now = read_knobs(state, BUDGET)
    assert set(now) >= {"scoring/signals/0/weight", "constraints/selector/q_e"}
    assert now["scoring/signals/0/weight"] == 0.4 and now["constraints/selector/q_e"] == "2"

    class Same(Lowest):
        def option(self, name: str, options: Sequence[str]) -> str:
            return str(now[name])

        def number(self, name: str, low: float, high: float, integer: bool) -> float:
            value = now[name]
            assert isinstance(value, int | float) and low <= value <= high
            return value

    assert assembled(turned(state, Same(), BUDGET), settings, "x").digest == state.digest


class Told(Lowest):
    """The choices that it was given, and no other."""

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
def test_a_composition_is_made_again_from_the_choices_read_off_it(
    seed: int, settings: Settings
) -> None:
    state = assembled(composed(Dice(Random(seed)), BUDGET), settings, "candidate")
    again = composed(Told(read_choices(state, BUDGET)), BUDGET)
    assert assembled(again, settings, "candidate").digest == state.digest


def test_a_state_that_was_not_composed_is_read_as_near_as_can_be(settings: Settings) -> None:
    for state in (*warm_starts(settings), base_state(settings)):
        near = assembled(composed(Told(read_choices(state, BUDGET)), BUDGET), settings, "candidate")
        assert parts(near) == parts(state)


def test_guards_are_no_knobs(settings: Settings) -> None:
    names = {str(knob.path[-1]) for knob in knobs(paper_state(settings))}
    assert names & {"eps", "r_min", "iters"} == set()


def test_warm_starts_are_safe_and_of_this_search() -> None:
    settings = Settings(base_policy="divprune", budgets=(BUDGET,))
    for state in (base_state(settings), *warm_starts(settings)):
        assert state.base_policy.name == "divprune"
        assert safety_check(materialize(state, BUDGET)).valid
    assert not materialize(base_state(settings), BUDGET).refines
    assert len({state.digest for state in warm_starts(settings)}) == len(warm_starts(settings))
