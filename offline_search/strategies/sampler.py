"""Optuna's TPE as the chooser of :mod:`offline_search.space`.

Knows nothing about states. A study is built anew from what was told, so it has no state of its own
to lose when a search is killed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    import optuna

Choice = float | str


class Study:
    """A TPE study that is told (choices, objective) and asked for further choices."""

    def __init__(self, seed: int, startup: int) -> None:
        """``startup`` choices are random, before there is anything to go by."""
        _require_optuna()
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=startup, multivariate=True, group=True
            )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def suggest(self) -> Suggestion:
        """A chooser whose choices go back with :meth:`tell`."""
        return Suggestion(self._study.ask())

    def tell(self, suggestion: Suggestion, objective: float | None) -> None:
        """What became of a suggestion; None where it could not be measured."""
        from optuna.trial import TrialState

        if objective is None:
            self._study.tell(suggestion.trial, state=TrialState.FAIL)
        else:
            self._study.tell(suggestion.trial, objective)

    def enqueue(self, choices: dict[str, Choice]) -> Suggestion:
        """A chooser that makes the given choices wherever it is asked for them."""
        self._study.enqueue_trial(choices)
        return self.suggest()


class Suggestion:
    """Choices of one trial of a study."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def option(self, name: str, options: Sequence[str]) -> str:
        """A categorical parameter."""
        chosen = self.trial.suggest_categorical(name, options)
        assert isinstance(chosen, str)
        return chosen

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A numerical parameter."""
        if integer:
            return self.trial.suggest_int(name, round(low), round(high))
        return round(self.trial.suggest_float(name, low, high), 4)


def _require_optuna() -> None:
    try:
        import optuna
    except ImportError:
        fix = 'pip install "vllm-autoprune[search]"'
        raise ConfigError("search", [Problem("optuna", "is not installed", fix)]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
