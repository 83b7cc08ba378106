"""Search strategies by name: each proposes the candidates of a round."""

from __future__ import annotations

from offline_search.strategies.language_model import AutoPrune, EvoPrompting, Strategy
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.sampling import AutoPrunePlus, RandomSearch, TpeSearch

STRATEGIES: dict[str, type[Strategy]] = {
    "autoprune": AutoPrune,
    "autoprune+": AutoPrunePlus,
    "evoprompting": EvoPrompting,
    "openevolve": OpenEvolve,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
