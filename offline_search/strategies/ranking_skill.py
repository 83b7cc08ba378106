"""Skill of a language model that ranks: does it know better candidates from worse ones?

It is asked about candidates of the last round, which are measured by then, as it would be asked
about suggestions that are not: a few menus of four, and which one scores highest. Candidates stand
in several menus, so that hits cannot be counted as if they were independent. What counts is the
rank of the chosen candidates, and chance is known by a permutation test: how often the same choices
would have led as far if the candidates of each round had exchanged their ranks at random.

In a simulation of 12 candidates a round, choices that do not depend on the ranks pass for skill in
four searches of a hundred; where a model's opinion and the truth have a correlation of 0.7, skill
is shown in three of four.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from offline_search.evaluation.history import History, Trial
from offline_search.strategies.strategy import Round

MENU_SIZE = 4
"""Candidates from which the model chooses one."""

_MENUS = 6
_ROUNDS = 4

MAX_QUESTIONS = _ROUNDS * _MENUS
"""Questions of a test at most."""

_CHANCE = 0.02
"""p-value with which skill is shown; there is one after each round of the test."""

_PERMUTATIONS = 999

Ask = Callable[[int, Sequence[Trial]], Awaitable[int]]
"""Asks a question, given its number in the round and a menu; gives the index of the choice."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of one round: each candidate's rank, from 0, the worst, and what was chosen of menus.

    Menus, and what was chosen of them, are indices of candidates.
    """

    ranks: tuple[int, ...]
    made: tuple[tuple[tuple[int, ...], int], ...]

    def lead(self, ranks: Sequence[int]) -> int:
        """How far the chosen candidates lead the mean rank of their menus, in all; an integer."""
        return sum(
            len(menu) * ranks[chosen] - sum(ranks[one] for one in menu)
            for menu, chosen in self.made
        )


class RankingSkill:
    """The test of one search's model; skill that is shown once is not tested again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._choices: list[Choices] = []
        self._shown = False

    async def is_shown(self, current: Round, ask: Ask) -> bool:
        """Whether skill is shown by now; asks the questions of this round if that is open."""
        if not self._shown and len(self._choices) < _ROUNDS:
            # A generator of its own: a search whose model has no skill is that without it.
            rng = Random(f"{self._seed} {current.number} test")
            measured = _measured_in(current.history, current.number - 1)
            if len(measured) > MENU_SIZE:
                self._choices.append(await _ask_about(current.history, measured, rng, ask))
                self._shown = probability_of_chance(self._choices, rng) <= _CHANCE
        return self._shown


async def _ask_about(history: History, trials: Sequence[Trial], rng: Random, ask: Ask) -> Choices:
    order = sorted(range(len(trials)), key=lambda one: history.estimate(trials[one]) or 0.0)
    ranks = tuple(order.index(one) for one in range(len(trials)))
    menus = [tuple(rng.sample(range(len(trials)), MENU_SIZE)) for _ in range(_MENUS)]
    questions = [ask(number, [trials[one] for one in menu]) for number, menu in enumerate(menus)]
    answers = await asyncio.gather(*questions)
    return Choices(ranks, tuple((menu, menu[a]) for menu, a in zip(menus, answers, strict=True)))


def _measured_in(history: History, number: int) -> list[Trial]:
    return [
        trial
        for trial in history.trials
        if trial.proposal.round == number and trial.result.status in ("evaluated", "dropped")
    ]


def probability_of_chance(choices: Sequence[Choices], rng: Random) -> float:
    """One-sided p-value of the choices of several rounds, by a permutation test."""
    lead = sum(one.lead(one.ranks) for one in choices)
    reached = sum(
        sum(one.lead(rng.sample(one.ranks, len(one.ranks))) for one in choices) >= lead
        for _ in range(_PERMUTATIONS)
    )
    return (1 + reached) / (1 + _PERMUTATIONS)
