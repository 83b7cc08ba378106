"""`random`: candidates drawn from the registry, uniformly. What any other strategy has to beat.

Knows nothing about the history.
"""

from __future__ import annotations

from offline_search.proposal import Draft, assembled
from offline_search.settings import Settings
from offline_search.space import Dice, composed
from offline_search.strategies.protocol import Round


class RandomStates:
    """Valid states at random."""

    asks = False
    races = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, this: Round) -> list[Draft]:
        """One draw after the other."""
        dice, budget = Dice(this.dice), self._settings.source_budget
        return [
            Draft("random", assembled(composed(dice, budget), self._settings, "candidate"))
            for _ in range(this.count)
        ]
