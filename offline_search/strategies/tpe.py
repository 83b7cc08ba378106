"""`tpe`: Optuna's TPE over the whole space of proposals, structure and numbers alike.

Knows nothing about language models.
"""

from __future__ import annotations

from offline_search.proposal import Draft, assembled
from offline_search.settings import Settings
from offline_search.space import composed
from offline_search.strategies.protocol import Round
from offline_search.strategies.sampler import Study, Suggestion

_STARTUP = 10


class Tpe:
    """Ask and tell, in the order of the search."""

    asks = False
    races = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._study = Study(settings.seed, _STARTUP)
        self._open: dict[str, Suggestion] = {}

    async def propose(self, this: Round) -> list[Draft]:
        """First what became of the last round, then the next suggestions."""
        for name, suggestion in self._open.items():
            self._study.tell(suggestion, this.history.objective_of(name))
        self._open = {}
        drafts = []
        for index in range(this.count):
            suggestion = self._study.suggest()
            body = composed(suggestion, self._settings.source_budget)
            drafts.append(Draft("tpe", assembled(body, self._settings, "candidate")))
            self._open[f"{this.number}.{index}"] = suggestion
        return drafts
