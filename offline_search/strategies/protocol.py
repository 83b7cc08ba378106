"""Strategy: proposes the drafts of a round from what is known by then.

Knows nothing about any single strategy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from offline_search.history import History
from offline_search.menu import Menu
from offline_search.prompt import Messages
from offline_search.proposal import Draft


class Ask(Protocol):
    """The proposer, asked for the draft at one index of a round."""

    def __call__(
        self,
        index: int,
        messages: Messages,
        origin: str,
        parents: tuple[str, ...],
        code_in: Callable[[str], str] | None = None,
        menu: Menu | None = None,
    ) -> Awaitable[Draft]:
        """With ``code_in`` a program is asked for; it finds the code in a reply.

        With a menu the proposer is held to its atoms.
        """


@dataclass(frozen=True)
class Round:
    """What a strategy has to go by: H_(t-1), its summary, and dice of its own for this round."""

    number: int
    count: int
    history: History
    summary: str
    dice: Random
    ask: Ask


class Strategy(Protocol):
    """Proposals of one search, round after round.

    A strategy keeps no secrets: what it proposes follows from settings, history and dice, so that
    a search that is run again proposes the same.
    """

    @property
    def asks(self) -> bool:
        """Whether a proposer is needed."""

    @property
    def races(self) -> bool:
        """Whether candidates that are surely behind are dropped before the last example."""

    async def propose(self, this: Round) -> list[Draft]:
        """The drafts of a round, at most ``this.count``."""
