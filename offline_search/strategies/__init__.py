"""Search strategies by name: each proposes the candidates of a round."""

from __future__ import annotations

from collections.abc import Callable

from offline_search.settings import Settings
from offline_search.strategies.language_model import AutoPrune, EvoPrompting
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.sampling import AutoPrunePlus, RandomSearch, TpeSearch
from offline_search.strategies.strategy import Strategy

__all__ = ["STRATEGIES", "Strategy"]

STRATEGIES: dict[str, Callable[[Settings], Strategy]] = {
    "autoprune": AutoPrune,
    "autoprune+": AutoPrunePlus,
    "evoprompting-code": EvoPrompting,
    "evoprompting-states": EvoPrompting,
    "openevolve-code": OpenEvolve,
    "openevolve-states": OpenEvolve,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
