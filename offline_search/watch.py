"""What a search tells while it runs.

Knows nothing about terminals: the command draws it, tests collect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offline_search.history import History, Trial
from offline_search.records import Chosen, Cost


class Watch(Protocol):
    """Told of every step; what it does with them changes nothing."""

    def began(self, history: History, examples: int) -> None:
        """The base policy is measured; the search split has this many examples."""

    def round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """A round is over; ``share`` of the budget of evaluations is spent."""

    def chosen(self, chosen: Chosen) -> None:
        """The search is over."""


class Silent:
    """Says nothing."""

    def began(self, history: History, examples: int) -> None:
        """Nothing."""

    def round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """Nothing."""

    def chosen(self, chosen: Chosen) -> None:
        """Nothing."""
