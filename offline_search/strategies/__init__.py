"""Strategies: who proposes the candidates of a round. All have the same evaluator and budget.

Knows nothing about how candidates are measured.
"""

from __future__ import annotations

from collections.abc import Callable

from offline_search.settings import Settings
from offline_search.strategies.autoprune import AutoPrune
from offline_search.strategies.autoprune_plus import AutoPrunePlus
from offline_search.strategies.evoprompting import EvoPrompting
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.protocol import Round, Strategy
from offline_search.strategies.random_states import RandomStates
from offline_search.strategies.tpe import Tpe

__all__ = ["STRATEGIES", "Round", "Strategy"]

STRATEGIES: dict[str, Callable[[Settings], Strategy]] = {
    "autoprune": AutoPrune,
    "autoprune+": AutoPrunePlus,
    "evoprompting": EvoPrompting,
    "openevolve": OpenEvolve,
    "random": RandomStates,
    "tpe": Tpe,
}
