"""`evoprompting`: a language model crosses and mutates parents drawn by rank (EvoPrompting).

Knows nothing about the summary of the history: parents and their scores are all that is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from offline_search.history import Trial
from offline_search.menu import offered
from offline_search.prompt import cross, propose
from offline_search.proposal import Draft
from offline_search.settings import Settings
from offline_search.strategies.protocol import Round
from offline_search.strategies.starts import plain_state

_PARENTS = 2
_POPULATION = 10


class EvoPrompting:
    """The best trials are the population; there is a first generation before there are parents."""

    asks = True
    races = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, this: Round) -> list[Draft]:
        """Each candidate has parents of its own."""
        population = this.history.ranked()[:_POPULATION]
        asked = []
        for index in range(this.count):
            if len(population) < _PARENTS:
                shown = plain_state(self._settings)
                menu = offered(self._settings, this.dice, [shown])
                messages = propose(self._settings, "", shown, index, this.count, menu)
                asked.append(this.ask(index, messages, "llm", (), menu=menu))
                continue
            parents = _drawn(population, this.dice)
            names = tuple(parent.name for parent in parents)
            states = [parent.state for parent in parents if parent.state is not None]
            menu = offered(self._settings, this.dice, states)
            messages = cross(self._settings, parents, menu)
            asked.append(this.ask(index, messages, "crossover", names, menu=menu))
        return list(await asyncio.gather(*asked))


def _drawn(population: Sequence[Trial], dice: Random) -> list[Trial]:
    """Two different parents, a better one likelier by its rank."""
    first = dice.choices(population, [1 / (1 + rank) for rank in range(len(population))])[0]
    others = [trial for trial in population if trial is not first]
    return [first, dice.choice(others)]
