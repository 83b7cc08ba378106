"""`autoprune+`: structure from a language model, numbers from TPE, with early stopping.

The first round is warm starts. After it, the first half of a search explores whole states, and the
second half refines the best of them as well. Every slot of a round goes to one origin, drawn with a
weight that is the origin's success rate:

    llm     a structure from the language model, which is poor at numbers
    wide    a whole state, structure and numbers, by TPE over all whole states measured so far
    tune    the numbers of one of the best structures, by TPE within it
    near    small random changes to the numbers of one of the best, if TPE has too few trials
    graft   one of the best with one component of another of them, or of a random state

The best are taken from different structures, because variants of one would crowd out the others.

Without a proposer there is no `llm`: the ablation that shows what the language model contributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from offline_search.candidates.components import CORE, Components, JsonObject, structure
from offline_search.candidates.proposal import Draft, assemble_state
from offline_search.candidates.search_space import (
    RandomSource,
    choices_of_state,
    numbers_of_state,
    resample_numbers,
    sample_proposal,
)
from offline_search.evaluation.history import History, Trial
from offline_search.settings import Settings
from offline_search.strategies.sampling import TpeStudy, sample_draft
from offline_search.strategies.start_states import paper_state, warm_start_states
from offline_search.strategies.strategy import Round, request_improvement
from vllm_autoprune.tpdsl.states.state import PruningState

_BEST_STRUCTURES = 5
"""Structures that further candidates are derived from, each represented by its best trial."""

_MIN_TPE_TRIALS = 4
"""Measured settings of a structure before TPE suggests its numbers."""

_STEP_WIDTH = 0.15
"""Standard deviation of a small change, as a share of the parameter's range."""

_RANDOM_STRUCTURES = 5
"""Random whole states before TPE suggests structures."""

_EXPLORING_ORIGINS = ("llm", "wide")
_ORIGINS = (*_EXPLORING_ORIGINS, "tune", "graft")
_WHOLE_STATE_ORIGINS = (*_EXPLORING_ORIGINS, "warm start", "random")


class AutoPrunePlus:
    """Combines a language model, TPE and grafts by their success rates."""

    stops_early = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.uses_proposer = bool(settings.proposer)

    async def propose(self, current: Round) -> list[Draft]:
        """Warm starts in the first round; after it, candidates of the drawn origins."""
        if current.number == 1:
            states = warm_start_states(self._settings)[: current.count]
            return [Draft("warm start", state) for state in states]
        best = _best_of_each_structure(current.history.ranked())
        origins = self._draw_origins(current, can_refine=bool(best))
        study = self._whole_state_study(current) if "wide" in origins else None
        drafts: dict[int, Draft] = {}
        for index, origin in enumerate(origins):
            if origin == "tune":
                drafts[index] = self._tune(best, current.history, current.rng)
            elif origin == "graft":
                drafts[index] = self._graft(best, current.rng)
            elif study is not None and origin == "wide":
                drafts[index] = sample_draft("wide", study.suggest(), self._settings)
            elif origin == "random":
                drafts[index] = sample_draft("random", RandomSource(current.rng), self._settings)
        return await self._add_requested(drafts, current)

    async def _add_requested(self, drafts: dict[int, Draft], current: Round) -> list[Draft]:
        """Request proposals for all indices without a draft."""
        missing = [index for index in range(current.count) if index not in drafts]
        default = paper_state(self._settings)
        requests = [
            request_improvement(current, self._settings, index, default) for index in missing
        ]
        replies = await asyncio.gather(*requests)
        drafts |= dict(zip(missing, replies, strict=True))
        return [drafts[index] for index in range(current.count)]

    def _draw_origins(self, current: Round, *, can_refine: bool) -> list[str]:
        """The origin of every slot of a round, drawn by success rates."""
        if not can_refine:
            return ["llm" if self.uses_proposer else "random"] * current.count
        exploring = 2 * current.number <= self._settings.rounds
        allowed = _EXPLORING_ORIGINS if exploring else _ORIGINS
        origins = [name for name in allowed if self.uses_proposer or name != "llm"]
        rates = _success_rates(current.history)
        weights = [rates[origin] for origin in origins]
        return [current.rng.choices(origins, weights)[0] for _ in range(current.count)]

    def _whole_state_study(self, current: Round) -> TpeStudy:
        """TPE over all measured whole states, whatever their origin.

        Small changes to a state are left out: TPE would prefer a region for its many variants.
        """
        budget, core = self._settings.source_budget, self._settings.core
        measured = [
            (trial.require_state(), trial.result.objective)
            for trial in current.history.trials
            if trial.result.objective is not None and trial.proposal.origin in _WHOLE_STATE_ORIGINS
        ]
        suggested = sum(trial.proposal.origin == "wide" for trial in current.history.trials)
        startup = len(measured) + _RANDOM_STRUCTURES - suggested
        study = TpeStudy(current.rng.randrange(2**31), startup)
        for state, objective in measured:
            suggestion = study.replay(choices_of_state(state, budget, core))
            sample_proposal(suggestion, budget, core)
            study.report(suggestion, objective)
        return study

    def _tune(self, best: Sequence[Trial], history: History, rng: Random) -> Draft:
        """Propose other numbers for one of the best states, whose structure stays."""
        parent = _draw_parent(best, rng)
        state, budget = parent.require_state(), self._settings.source_budget
        measured = [
            (trial.require_state(), trial.result.objective)
            for trial in history.trials
            if trial.result.objective is not None
            and structure(trial.require_state()) == structure(state)
        ]
        if len(measured) < _MIN_TPE_TRIALS:
            source = _NeighbourSource(state, budget, rng)
            return self._derive("near", resample_numbers(state, source, budget), parent)
        study = TpeStudy(rng.randrange(2**31), startup=0)
        for other, objective in measured:
            suggestion = study.replay(numbers_of_state(other, budget))
            resample_numbers(other, suggestion, budget)
            study.report(suggestion, objective)
        return self._derive("tune", resample_numbers(state, study.suggest(), budget), parent)

    def _graft(self, best: Sequence[Trial], rng: Random) -> Draft:
        """One of the best states with a component of another one, or of a random state."""
        parent = _draw_parent(best, rng)
        state = parent.require_state()
        others = [
            trial.require_state() for trial in best[:_BEST_STRUCTURES] if trial.state != state
        ]
        if others and rng.random() < 0.5:
            donor = Components.from_state(rng.choice(others))
        else:
            source, settings = RandomSource(rng), self._settings
            proposal = sample_proposal(source, settings.source_budget, settings.core)
            donor = Components.model_validate(proposal)
        grafts = (*_GRAFTS, _take_core) if self._settings.core else _GRAFTS
        grafted = rng.choice(grafts)(Components.from_state(state), donor, rng)
        return self._derive("graft", grafted.to_json(), parent)

    def _derive(self, origin: str, components: JsonObject, parent: Trial) -> Draft:
        return Draft(origin, assemble_state(components, self._settings), (), (parent.name,))


class _NeighbourSource:
    """Choices close to those of a state; each stays as it is with probability one half."""

    def __init__(self, state: PruningState, budget: int, rng: Random) -> None:
        self._current = numbers_of_state(state, budget)
        self._rng = rng

    def option(self, name: str, options: Sequence[str]) -> str:
        """The current option or one next to it."""
        index = list(options).index(str(self._current[name]))
        index += self._rng.choice((-1, 0, 0, 1))
        return options[min(max(index, 0), len(options) - 1)]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The current number, or a normally distributed step from it within the range."""
        current = float(self._current[name])
        if self._rng.random() < 0.5:
            return current
        changed = min(high, max(low, self._rng.gauss(current, _STEP_WIDTH * (high - low))))
        return round(changed) if integer else round(changed, 4)


def _best_of_each_structure(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trial of each structure, in order of rank."""
    best: dict[tuple[str, ...], Trial] = {}
    for trial in ranked:
        best.setdefault(structure(trial.require_state()), trial)
    return list(best.values())


def _success_rates(history: History) -> dict[str, float]:
    """Laplace-smoothed success rate of each origin; a success improves on the best so far."""
    successes, trials = dict.fromkeys(_ORIGINS, 1.0), dict.fromkeys(_ORIGINS, 2.0)
    best = history.base.objective or 0.0
    for trial in history.trials:
        origin = "tune" if trial.proposal.origin == "near" else trial.proposal.origin
        improves = trial.objective is not None and trial.objective > best
        best = max(best, trial.objective) if trial.objective is not None else best
        if origin in trials:
            trials[origin] += 1
            successes[origin] += improves
    return {origin: successes[origin] / trials[origin] for origin in _ORIGINS}


def _draw_parent(best: Sequence[Trial], rng: Random) -> Trial:
    """One of the best structures, with a probability inverse to its rank."""
    candidates = best[:_BEST_STRUCTURES]
    return rng.choices(candidates, [1 / (1 + rank) for rank in range(len(candidates))])[0]


def _add_signal(state: Components, donor: Components, rng: Random) -> Components:
    present = {signal.atom for signal in state.scoring.signals}
    new = [signal for signal in donor.scoring.signals if signal.atom not in present]
    if not new:
        return state
    return state.with_scoring(signals=(*state.scoring.signals, rng.choice(new)))


def _drop_signal(state: Components, donor: Components, rng: Random) -> Components:
    signals = list(state.scoring.signals)
    if len(signals) > 1:
        signals.pop(rng.randrange(len(signals)))
    return state.with_scoring(signals=tuple(signals))


def _take_core(state: Components, donor: Components, _: Random) -> Components:
    return state.model_copy(update={CORE: donor.core})


_GRAFTS: tuple[Callable[[Components, Components, Random], Components], ...] = (
    _add_signal,
    _drop_signal,
    lambda state, donor, _: state.with_scoring(fusion=donor.scoring.fusion),
    lambda state, donor, _: state.with_scoring(kernel=donor.scoring.kernel),
    lambda state, donor, _: state.with_constraints(pool=donor.constraints.pool),
    lambda state, donor, _: state.with_constraints(selector=donor.constraints.selector),
    lambda state, donor, _: state.model_copy(update={"reassembly": donor.reassembly}),
)
