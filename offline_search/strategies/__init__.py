"""Search strategies by name: each proposes the candidates of a round."""

from __future__ import annotations

from collections.abc import Callable

from offline_search.settings import Settings
from offline_search.strategies.language_model import (
    AutoPrune,
    EvoPrompting,
    EvoPromptingCode,
    OpenEvolveCode,
)
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.sampling import AutoPrunePlus, RandomSearch, TpeSearch
from offline_search.strategies.strategy import Strategy

__all__ = ["CODE_STRATEGIES", "STRATEGIES", "Strategy"]

CODE_STRATEGIES = ("evoprompting-code", "openevolve-code")
"""Strategies whose candidates are programs, which only an evaluator in this process can measure."""

STRATEGIES: dict[str, Callable[[Settings], Strategy]] = {
    "autoprune": AutoPrune,
    "autoprune+": AutoPrunePlus,
    "evoprompting-code": EvoPromptingCode,
    "evoprompting-states": EvoPrompting,
    "openevolve-code": OpenEvolveCode,
    "openevolve-states": OpenEvolve,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
