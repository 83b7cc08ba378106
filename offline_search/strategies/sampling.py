"""Strategies that sample choices: at random, by Optuna's TPE, and `autoprune+`.

`autoprune+` races candidates of TPE, mutation and crossover, with or without a proposer. A round
proposes three times as many candidates as other strategies, because most of them are dropped after
an eighth of the examples. A search starts with the paper's structure, every signal alone, and
proposals of a model that writes lists; the other slots of the first round get random states. Every
later slot is assigned to an origin:

    llm        a state from a language model
    tpe        structure and numbers by TPE over all candidates, raced ones by their estimates
    mutation   one of the best with some choices changed
    crossover  choices of two of the best

The best have different structures, because variants of one would crowd out the others.
Once the leaders are tied, mutations give way to random states, and crossovers and suggestions of
TPE to suggestions of other structures.
A language model gets at most three slots in ten; Centaur (arXiv 2603.24647) found more to be worse.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

from offline_search.candidates import (
    Draft,
    assemble_state,
    minimal_state,
    nearest_state,
    paper_state,
)
from offline_search.choices import Choice, ChoiceSource, ClippedChoices, RandomSource
from offline_search.components import (
    BASE,
    CORE,
    RANK_AT,
    JsonObject,
    components_json,
    structure,
)
from offline_search.search_space import atom_names, choices_of_state, sample_proposal
from offline_search.settings import MAX_QUOTA, MODEL_SHARE, Settings
from offline_search.strategies.language_model import Round, Strategy
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.state import PruningState

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_STARTUP_TRIALS = 10
"""Number of random suggestions before TPE's first."""


class _RandomSearch(Strategy, name="random"):
    """`random`: states drawn uniformly from the registry; the baseline of all strategies."""

    uses_proposer = False

    async def propose(self, current: Round) -> list[Draft]:
        """Draw independent random states."""
        source = RandomSource(current.rng)
        return [
            _sample_draft("random", source, self._settings)
            for _ in range(current.count)
        ]


class _TpeSearch(Strategy, name="tpe"):
    """`tpe`: Optuna's TPE over structure and numbers."""

    uses_proposer = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._study = _open_study(settings.seed, _STARTUP_TRIALS)
        self._pending: dict[str, optuna.Trial] = {}

    async def propose(self, current: Round) -> list[Draft]:
        """Report the results of the last round to the study, then take new suggestions."""
        from optuna.trial import TrialState

        for name, trial in self._pending.items():
            objective = current.history.objective_of(name)
            failed = TrialState.FAIL if objective is None else None
            self._study.tell(trial, objective, state=failed)
        self._pending = {}
        drafts = []
        for index in range(current.count):
            draft, trial = _suggest(self._study, current.tied, self._settings)
            self._pending[f"{current.number}.{index}"] = trial
            drafts.append(draft)
        return drafts


def _sample_draft(origin: str, source: ChoiceSource, settings: Settings) -> Draft:
    return Draft(origin, assemble_state(sample_proposal(source, settings), settings))


_MAX_SUGGESTIONS = 20
"""Largest number of suggestions to find a structure that is not tied."""


def _suggest(
    study: optuna.Study, tied: Collection[tuple[str, ...]], settings: Settings
) -> tuple[Draft, optuna.Trial]:
    """A suggestion of TPE, if possible with a structure that is not in ``tied``."""
    for _ in range(_MAX_SUGGESTIONS):
        trial = study.ask()
        draft = _sample_draft("tpe", _SuggestedChoices(trial), settings)
        if not tied or draft.state is None or structure(draft.state) not in tied:
            break
    return draft, trial


def _open_study(seed: int, startup: int) -> optuna.Study:
    """A TPE study whose first ``startup`` suggestions are random."""
    try:
        import optuna
    except ImportError:
        fix = 'from a checkout: pip install ".[search]"'
        raise ConfigError.of(
            "optuna", "is not installed", fix, subject="search"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=startup, multivariate=True, group=True
        )
    return optuna.create_study(direction="maximize", sampler=sampler)


class _SuggestedChoices:
    """Choices that the sampler of a study suggests for a trial."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def option(self, name: str, options: Sequence[str]) -> str:
        return str(self._trial.suggest_categorical(name, options))

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        if integer:
            return self._trial.suggest_int(name, round(low), round(high))
        return round(self._trial.suggest_float(name, low, high), 4)


class _MeasuredPoint(ClippedChoices):
    """Choices of a measured state, and the distributions that they belong to.

    They are added to a study without asking the sampler, which would take 50 ms a point.
    """

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        super().__init__(choices)
        self.values: dict[str, Choice] = {}
        self.distributions: dict[str, BaseDistribution] = {}

    def option(self, name: str, options: Sequence[str]) -> str:
        from optuna.distributions import CategoricalDistribution

        self.distributions[name] = CategoricalDistribution(options)
        value = self.values[name] = super().option(name, options)
        return value

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        from optuna.distributions import FloatDistribution, IntDistribution

        self.distributions[name] = (
            IntDistribution(round(low), round(high))
            if integer
            else FloatDistribution(low, high)
        )
        value = self.values[name] = super().number(name, low, high, integer)
        return value


_BEST_STRUCTURES = 5
"""Number of structures, represented by their best trials, from which candidates are derived."""

_CORE_SHARES = (0.5, 0.75)
"""Core shares of the warm starts in a search of cores."""

_ORIGINS = ("tpe", "mutation", "tpe", "crossover", "tpe", "mutation")
"""Origins of the slots in turn: half by TPE, a third mutations, the others crossovers."""

_MUTATION_RATE = 0.15
"""Probability that a mutation changes a choice."""


class _AutoPrunePlus(Strategy, name="autoprune+"):
    """Races candidates of TPE, mutation, crossover and a language model."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.uses_proposer = bool(settings.proposer)
        self._warm_starts = _warm_start_states(settings)

    async def propose(self, current: Round) -> list[Draft]:
        """Proposals of the model, then warm starts, then derived candidates.

        Until something is measured, random states replace the derived candidates.
        """
        history = current.history
        settings = self._settings
        rng = current.rng
        best = history.ranked_structures()
        if len(best) < 2:
            best = history.ranked()
        writes = self.uses_proposer and (settings.proposals_per_reply > 1 or best)
        written_count = int(MODEL_SHARE * current.count) if writes else 0
        slots = current.count - written_count
        # Warm starts would fill several small rounds, so they take half of a round; the
        # remaining ones wait for later rounds.
        count = slots // 2 if best else slots
        starts = self._warm_starts[:count]
        self._warm_starts = self._warm_starts[count:]
        slots -= len(starts)
        if best:
            # TPE learns from all candidates that were measured, whatever their origin.
            study = _open_study(rng.randrange(2**31), startup=0)
            derived = []
            import optuna

            for trial in history.trials:
                if (objective := history.estimate(trial)) is not None:
                    point = _MeasuredPoint(
                        choices_of_state(trial.require_state(), settings)
                    )
                    sample_proposal(point, settings)
                    study.add_trial(
                        optuna.trial.create_trial(
                            params=dict(point.values),
                            distributions=dict(point.distributions),
                            value=objective,
                        )
                    )
            for origin in islice(cycle(_ORIGINS), slots):
                if current.tied and origin == "mutation":
                    derived.append(_sample_draft("random", RandomSource(rng), settings))
                    continue
                if current.tied or origin == "tpe":
                    derived.append(_suggest(study, current.tied, settings)[0])
                    continue
                if origin == "crossover" and len(best) < 2:
                    origin = "mutation"
                count, rate = (2, 0.0) if origin == "crossover" else (1, _MUTATION_RATE)
                parents = self.draw_parents(best, count, rng, _BEST_STRUCTURES)
                choices = [
                    choices_of_state(trial.require_state(), settings)
                    for trial in parents
                ]
                draft = _sample_draft(
                    origin, RandomSource(rng, choices, rate), settings
                )
                names = tuple(dict.fromkeys(parent.name for parent in parents))
                derived.append(replace(draft, parents=names))
        else:
            source = RandomSource(rng)
            derived = [_sample_draft("random", source, settings) for _ in range(slots)]
        others = [*(Draft("warm start", state) for state in starts), *derived]
        written = await current.request_improvements(settings, written_count, others)
        return [*written, *others]


def _warm_start_states(settings: Settings) -> list[PruningState]:
    """The paper's structure at its q_e and at K, then every signal alone with q_e = K.

    Which signals matter differs from model to model: one evaluation shows it for a signal alone,
    but many are needed for a signal among others. q_e is K, because with a weak base policy a full
    exchange may be best. After the paper's state, a search of cores also starts with two cores, and
    a search of the place of ranking with the paper's state ranked before the merger. A search of
    base policies also starts with every base policy alone, if the space is not restricted.
    """
    paper = paper_state(settings)
    components = components_json(paper)
    largest_quota = min(settings.source_budget, MAX_QUOTA)
    bases = [
        nearest_state({**components, BASE: {"name": name}}, settings).without_exchange()
        for name in (settings.other_bases if settings.space == "all" else ())
    ]
    cores: list[JsonObject] = [{CORE: {"share": share}} for share in _CORE_SHARES]
    ranked: list[JsonObject] = [{RANK_AT: "merger_in"}]
    variants = (cores if settings.core else []) + (ranked if settings.rank_at else [])
    states = [
        paper,
        *bases,
        *(nearest_state({**components, **variant}, settings) for variant in variants),
        paper_state(settings, largest_quota),
        *(
            minimal_state(settings, name, largest_quota)
            for name in atom_names("scoring", settings)
        ),
    ]
    # With a small K or in a small space, some of the states are equal.
    return list({state.digest: state for state in states}.values())
