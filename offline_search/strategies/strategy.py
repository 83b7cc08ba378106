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

    async def propose(self, current: Round) -> list[Draft]:
        """The drafts of a round, at most ``current.count``."""
