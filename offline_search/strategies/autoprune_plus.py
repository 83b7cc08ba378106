"""`autoprune+`: TPE, mutation and crossover over raced candidates, with or without a proposer.

A round proposes three times as many candidates as other strategies, because most of them are
dropped after an eighth of the examples. A search starts with the paper's structure, every signal
alone, and proposals of a model that writes lists; what is left of the first round has random
states. Every further slot goes to one origin:

    llm        a state from a language model
    tpe        structure and numbers by TPE over all candidates, raced ones by their estimates
    mutation   one of the best with some choices changed
    crossover  choices of two of the best

The best are taken from different structures, because variants of one would crowd out the others.
A language model gets at most three slots in ten; Centaur (arXiv 2603.24647) found more to be worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from offline_search.candidates.components import Choice, structure
from offline_search.candidates.proposal import Draft, assemble_state
from offline_search.candidates.search_space import (
    RandomSource,
    choices_of_state,
    sample_proposal,
)
from offline_search.evaluation.history import History, Trial
from offline_search.settings import Library, Settings, Space
from offline_search.strategies.sampling import TpeStudy, sample_draft
from offline_search.strategies.start_states import minimal_state, warm_start_states
from offline_search.strategies.strategy import Round, request_improvements

_BEST_STRUCTURES = 5
"""Structures that further candidates are derived from, each represented by its best trial."""

_MODEL_SHARE = 0.3
"""Share of a round's slots that a language model gets."""

_MUTATION_RATE = 0.15
"""Probability that a mutation changes a choice."""

_STEP_WIDTH = 0.2
"""Standard deviation of the change of a number, as a share of the parameter's range."""


class AutoPrunePlus:
    """Races candidates of TPE, mutation, crossover and a language model."""

    stops_early = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.uses_proposer = bool(settings.proposer)
        self._warm_starts = warm_start_states(settings)

    async def propose(self, current: Round) -> list[Draft]:
        """Proposals of the model, then warm starts, then derived candidates.

        In place of the last there are random states until something is measured.
        """
        best = _best_of_each_structure(current.history.ranked())
        writes = self.uses_proposer and (self._settings.proposals_per_reply > 1 or best)
        written_count = int(_MODEL_SHARE * current.count) if writes else 0
        slots = current.count - written_count
        # In small rounds warm starts alone would fill several.
        warm_starts = self._take_warm_starts(slots // 2 if best else slots)
        slots -= len(warm_starts)
        derive = self._derive if best else self._draw_random
        derived = derive(current, slots, best)
        example = minimal_state(self._settings)
        written = await request_improvements(current, self._settings, written_count, example)
        return [*written, *warm_starts, *derived]

    def _take_warm_starts(self, count: int) -> list[Draft]:
        """The next warm starts: those for which earlier rounds had no slot."""
        states, self._warm_starts = self._warm_starts[:count], self._warm_starts[count:]
        return [Draft("warm start", state) for state in states]

    def _draw_random(self, current: Round, count: int, best: Sequence[Trial]) -> list[Draft]:
        source = RandomSource(current.rng)
        return [sample_draft("random", source, self._settings) for _ in range(count)]

    def _derive(self, current: Round, count: int, best: Sequence[Trial]) -> list[Draft]:
        """Candidates that follow from what is measured."""
        study = self._build_study(current.history, current.rng)
        origins = _spread_origins(count)
        return [self._sample(origin, study, best, current.rng) for origin in origins]

    def _sample(self, origin: str, study: TpeStudy, best: Sequence[Trial], rng: Random) -> Draft:
        if origin == "tpe":
            return sample_draft("tpe", study.suggest(), self._settings)
        parents = [_draw_parent(best, rng)]
        if origin == "crossover":
            parents.append(
                _draw_parent([one for one in best if one is not parents[0]] or best, rng)
            )
        space = self._space
        choices = [choices_of_state(one.require_state(), *space) for one in parents]
        rate = _MUTATION_RATE if origin == "mutation" else 0.0
        proposal = sample_proposal(_ParentSource(choices, rate, rng), *space)
        names = tuple(dict.fromkeys(parent.name for parent in parents))
        return Draft(origin, assemble_state(proposal, self._settings), (), names)

    @property
    def _space(self) -> tuple[int, bool, bool, tuple[str, ...], Library, Space]:
        """K, whether candidates may have a core and rank before the merger, bases, library."""
        one = self._settings
        return one.source_budget, one.core, one.rank_at, one.bases, one.library, one.space

    def _build_study(self, history: History, rng: Random) -> TpeStudy:
        """TPE over all candidates that were measured, whatever their origin."""
        space = self._space
        study = TpeStudy(rng.randrange(2**31), startup=0)
        for trial in history.trials:
            objective = history.estimate(trial)
            if objective is not None:
                choices = choices_of_state(trial.require_state(), *space)
                study.add(choices, objective, lambda source: sample_proposal(source, *space))
        return study


class _ParentSource:
    """Choices of one or several parents, some of them changed; random where no parent has one."""

    def __init__(self, parents: Sequence[Mapping[str, Choice]], rate: float, rng: Random) -> None:
        self._parents = parents
        self._rate = rate
        self._rng = rng
        self._random = RandomSource(rng)

    def option(self, name: str, options: Sequence[str]) -> str:
        """An option of a parent, or any."""
        value = self._inherit(name)
        if value is None or self._rng.random() < self._rate:
            return self._random.option(name, options)
        return str(value)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number of a parent, sometimes with a normally distributed step within the range."""
        value = self._inherit(name)
        if value is None:
            return self._random.number(name, low, high, integer)
        if self._rng.random() >= 2 * self._rate:
            return float(value)
        step = self._rng.gauss(0, _STEP_WIDTH * (high - low))
        changed = min(high, max(low, float(value) + step))
        return round(changed) if integer else round(changed, 4)

    def _inherit(self, name: str) -> Choice | None:
        known = [parent[name] for parent in self._parents if name in parent]
        return self._rng.choice(known) if known else None


def _spread_origins(count: int) -> list[str]:
    """Origins of ``count`` slots: half by TPE, a third mutations, the others crossovers."""
    pattern = ("tpe", "mutation", "tpe", "crossover", "tpe", "mutation")
    return [pattern[index % len(pattern)] for index in range(count)]


def _best_of_each_structure(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trial of each structure, in order of rank; all trials if they have one structure."""
    best: dict[tuple[str, ...], Trial] = {}
    for trial in ranked:
        best.setdefault(structure(trial.require_state()), trial)
    return list(best.values() if len(best) > 1 else ranked)


def _draw_parent(best: Sequence[Trial], rng: Random) -> Trial:
    """One of the best structures, with a probability inverse to its rank."""
    candidates = best[:_BEST_STRUCTURES]
    return rng.choices(candidates, [1 / (1 + rank) for rank in range(len(candidates))])[0]
