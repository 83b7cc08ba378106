"""`autoprune`: the paper's loop. A language model proposes every candidate, given the history.

Knows nothing about numbers or structures: all is left to the model.
"""

from __future__ import annotations

import asyncio

from offline_search.menu import offered
from offline_search.prompt import propose
from offline_search.proposal import Draft
from offline_search.settings import Settings
from offline_search.strategies.protocol import Round
from offline_search.strategies.starts import plain_state


class AutoPrune:
    """Algorithm 2 as it stands."""

    asks = True
    races = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, this: Round) -> list[Draft]:
        """m requests at once: they share their prompt, and the endpoint batches them."""
        best = this.history.best()
        shown = plain_state(self._settings) if best is None or best.state is None else best.state
        parents = () if best is None else (best.name,)
        asked = []
        for index in range(this.count):
            menu = offered(self._settings, this.dice, [shown])
            told = propose(self._settings, this.summary, shown, index, this.count, menu)
            asked.append(this.ask(index, told, "llm", parents, menu=menu))
        return list(await asyncio.gather(*asked))
