"""Permutation test of whether a language model ranks candidates better than chance.

The model is asked which one of a shortlist scores highest, as it would be asked about suggestions
of TPE, but about candidates of the last round, which are measured by then. Candidates of all
origins are in shortlists, because those of TPE alone would be few.

A candidate is in several shortlists, so that right answers are not independent of each other. The
p-value is the share of random permutations of the ranks within each round for which the same
answers have at least as high a rank sum. In a simulation (12 candidates a round, scores with a
noise of 0.6 standard deviations) one search of twenty finds skill where there is none, and three of
four find it where a model's opinion and the true score have a correlation of 0.7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import mul
from random import Random

from offline_search.evaluation.history import History, Trial
from offline_search.strategies.strategy import Round

SHORTLIST_SIZE = 4
"""Candidates from which the model chooses one."""

_SHORTLISTS = 6
_ROUNDS = 4

MAX_QUESTIONS = _ROUNDS * _SHORTLISTS
"""Questions of a test at most."""

_SIGNIFICANCE_LEVEL = 0.02
"""Largest p-value that counts as skill; it is computed after each round of the test."""

_PERMUTATIONS = 999

RequestChoice = Callable[[int, Sequence[Trial]], Awaitable[int | None]]
"""Asks about a shortlist, given its number in the round; the index of the choice, or None if the
request failed."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one round: each candidate's rank, 0 the worst, and its weight in the statistic.

    The statistic is the sum of the choices' ranks less the mean rank of their shortlists, times
    the size of a shortlist. It is linear in the ranks: a weight has that size for each time the
    candidate was chosen, less one for each shortlist that it was in.
    """

    ranks: tuple[int, ...]
    weights: tuple[int, ...]

    def lead(self, ranks: Sequence[int]) -> int:
        """The statistic, if the candidates had these ranks."""
        return sum(map(mul, self.weights, ranks))


class RankingSkill:
    """The test of one search's model; skill that is found once is not tested again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._answers: list[Answers] = []
        self._found = False

    async def is_found(self, current: Round, request_choice: RequestChoice) -> bool:
        """Whether the model has skill as far as is known; asks this round's questions if needed."""
        if not self._found and len(self._answers) < _ROUNDS:
            # A generator of its own, so that the test changes no random draw of the search.
            rng = Random(f"{self._seed} {current.number} test")
            answers = await _question(current, rng, request_choice)
            if answers is not None:
                self._answers.append(answers)
                self._found = chance_probability(self._answers, rng) <= _SIGNIFICANCE_LEVEL
        return self._found


async def _question(current: Round, rng: Random, request_choice: RequestChoice) -> Answers | None:
    """The answers of a round; None without enough measured candidates, or without any answer."""
    trials = _measured_trials(current.history, current.number - 1)
    if len(trials) <= SHORTLIST_SIZE:
        return None
    shortlists = [rng.sample(range(len(trials)), SHORTLIST_SIZE) for _ in range(_SHORTLISTS)]
    requests = [
        request_choice(number, [trials[index][0] for index in shortlist])
        for number, shortlist in enumerate(shortlists)
    ]
    replies = await asyncio.gather(*requests)
    answers = [
        (shortlist, shortlist[reply])
        for shortlist, reply in zip(shortlists, replies, strict=True)
        if reply is not None
    ]
    return weigh_answers([score for _, score in trials], answers) if answers else None


def weigh_answers(scores: Sequence[float], answers: Sequence[tuple[Sequence[int], int]]) -> Answers:
    """Ranks and weights, given the candidates' scores, and shortlists with their choices."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    weights = [0] * len(scores)
    for shortlist, choice in answers:
        weights[choice] += len(shortlist)
        for index in shortlist:
            weights[index] -= 1
    return Answers(tuple(map(order.index, range(len(scores)))), tuple(weights))


def _measured_trials(history: History, number: int) -> list[tuple[Trial, float]]:
    """The candidates of a round that were measured, with their objectives."""
    return [
        (trial, objective)
        for trial in history.trials
        if trial.proposal.round == number and trial.result.status in ("evaluated", "dropped")
        if (objective := history.estimate(trial)) is not None
    ]


def chance_probability(answers: Sequence[Answers], rng: Random) -> float:
    """One-sided p-value of the answers of several rounds, by a permutation test."""
    lead = sum(one.lead(one.ranks) for one in answers)
    reached = sum(
        sum(one.lead(rng.sample(one.ranks, len(one.ranks))) for one in answers) >= lead
        for _ in range(_PERMUTATIONS)
    )
    return (1 + reached) / (1 + _PERMUTATIONS)
