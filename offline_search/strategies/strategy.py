"""Strategy protocol, what a strategy is given in each round, and how many candidates and rounds.

A baseline of the paper evolves states, or as it was published Python code: a program
``select(features, signals, K)``, confined and measured on the tokens that it selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from offline_search.candidates import Draft
from offline_search.history import History
from offline_search.proposer import ProposalClient
from offline_search.settings import Settings


@dataclass(frozen=True)
class Round:
    """Input of one round: history H_(t-1), its summary, a random generator, and the proposer."""

    number: int
    count: int
    history: History
    summary: str
    rng: Random
    client: ProposalClient


class Strategy(Protocol):
    """Proposes the candidates of a search, round by round.

    Proposals must follow from settings, history and random generator alone, so that a search that
    is run again on its ledger makes the same ones.
    """

    @property
    def uses_proposer(self) -> bool:
        """Whether the strategy sends requests to a language model."""

    @property
    def stops_early(self) -> bool:
        """Whether candidates that are significantly behind are dropped before the last example."""

    async def propose(self, current: Round) -> list[Draft]:
        """The drafts of a round, at most ``current.count``."""


RACED_PER_PLACE = 3
"""Candidates that are proposed for each of a round's m places where candidates are raced."""

_MAX_ROUNDS_FACTOR = 4
"""A search with a fixed number of evaluations runs at most this many times T rounds."""


def has_fixed_evaluations(settings: Settings, strategy: Strategy) -> bool:
    """Whether rounds go on until T x m evaluations are spent, instead of ending after T rounds."""
    return settings.equal_evaluations or races(settings, strategy)


def races(settings: Settings, strategy: Strategy) -> bool:
    """Whether candidates are dropped after a part of the examples, and more of them proposed."""
    return settings.race or strategy.stops_early


def maximum_rounds(settings: Settings, strategy: Strategy) -> int:
    """The largest number of rounds that a search may take."""
    factor = _MAX_ROUNDS_FACTOR if has_fixed_evaluations(settings, strategy) else 1
    return settings.rounds * factor
