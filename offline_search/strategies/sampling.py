"""Strategies without a language model: uniform random search, and Optuna's TPE."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from offline_search.candidates.components import Choice, ChoiceSource
from offline_search.candidates.proposal import Draft, assemble_state
from offline_search.candidates.search_space import RandomSource, sample_proposal
from offline_search.settings import Settings
from offline_search.strategies.strategy import Round
from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_STARTUP_TRIALS = 10


class RandomSearch:
    """`random`: states drawn uniformly from the registry; the baseline of all strategies."""

    uses_proposer = False
    stops_early = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """Independent random states."""
        source = RandomSource(current.rng)
        return [sample_draft("random", source, self._settings) for _ in range(current.count)]


class TpeSearch:
    """`tpe`: Optuna's TPE over structure and numbers."""

    uses_proposer = False
    stops_early = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._study = TpeStudy(settings.seed, _STARTUP_TRIALS)
        self._pending: dict[str, Suggestion] = {}

    async def propose(self, current: Round) -> list[Draft]:
        """Report the results of the last round to the study, then take new suggestions."""
        for name, suggestion in self._pending.items():
            self._study.report(suggestion, current.history.objective_of(name))
        self._pending = {}
        drafts = []
        for index in range(current.count):
            suggestion = self._study.suggest()
            drafts.append(sample_draft("tpe", suggestion, self._settings))
            self._pending[f"{current.number}.{index}"] = suggestion
        return drafts


def sample_draft(origin: str, source: ChoiceSource, settings: Settings) -> Draft:
    """A draft of a state whose structure and numbers come from a source of choices."""
    proposal = sample_proposal(
        source,
        settings.source_budget,
        settings.core,
        settings.rank_at,
        settings.bases,
        settings.library,
        settings.space,
    )
    return Draft(origin, assemble_state(proposal, settings))


class TpeStudy:
    """A TPE study of (choices, objective) pairs that suggests further choices."""

    def __init__(self, seed: int, startup: int) -> None:
        """The first ``startup`` suggestions are random."""
        _require_optuna()
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=startup, multivariate=True, group=True
            )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def suggest(self) -> Suggestion:
        """New choices, whose result goes back with :meth:`report`."""
        return Suggestion(self._study.ask())

    def report(self, suggestion: Suggestion, objective: float | None) -> None:
        """Add the result of a suggestion; None for a failed evaluation."""
        from optuna.trial import TrialState

        if objective is None:
            self._study.tell(suggestion.trial, state=TrialState.FAIL)
        else:
            self._study.tell(suggestion.trial, objective)

    def add(
        self,
        choices: Mapping[str, Choice],
        objective: float,
        choose: Callable[[ChoiceSource], object],
    ) -> None:
        """Add a measured point: ``choices`` where ``choose`` asks for them, and its objective.

        The point is written into the study without asking the sampler, which takes 50 ms a point.
        """
        import optuna

        recorder = _PointRecorder(choices)
        choose(recorder)
        self._study.add_trial(
            optuna.trial.create_trial(
                params=dict(recorder.values),
                distributions=dict(recorder.distributions),
                value=objective,
            )
        )


class Suggestion:
    """Choices of one trial of a study."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def option(self, name: str, options: Sequence[str]) -> str:
        """A categorical parameter."""
        return str(self.trial.suggest_categorical(name, options))

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A numeric parameter."""
        if integer:
            return self.trial.suggest_int(name, round(low), round(high))
        return round(self.trial.suggest_float(name, low, high), 4)


class _PointRecorder:
    """Choices with given values, and the distributions that they are made from."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices
        self.values: dict[str, Choice] = {}
        self.distributions: dict[str, BaseDistribution] = {}

    def option(self, name: str, options: Sequence[str]) -> str:
        """The option of the given choices, or the first option where they have none."""
        from optuna.distributions import CategoricalDistribution

        value = str(self._choices.get(name, options[0]))
        self.values[name] = value
        self.distributions[name] = CategoricalDistribution(options)
        return value

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The number of the given choices, within its range, or the middle where they have none."""
        from optuna.distributions import FloatDistribution, IntDistribution

        value = min(high, max(low, float(self._choices.get(name, (low + high) / 2))))
        self.values[name] = value = round(value) if integer else value
        self.distributions[name] = (
            IntDistribution(round(low), round(high)) if integer else FloatDistribution(low, high)
        )
        return value


def _require_optuna() -> None:
    try:
        import optuna
    except ImportError:
        fix = 'from a checkout: pip install ".[search]"'
        raise ConfigError("search", [Problem("optuna", "is not installed", fix)]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
