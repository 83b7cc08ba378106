"""`autoprune+`: TPE, mutation and crossover over raced candidates, with or without a proposer.

A round proposes three times as many candidates as other strategies, because most of them are
dropped after an eighth of the examples. A search starts with the paper's structure, every signal
alone, and proposals of a model that writes lists; what is left of the first round has random
states. Every further slot goes to one origin:

    llm        a state from a language model
    ranked     with menus, as for a small language model: the one of four suggestions of TPE that
               it ranks first, if it has skill (``ranking_skill``)
    tpe        structure and numbers by TPE over all candidates, raced ones by their estimates
    mutation   one of the best with some choices changed
    crossover  choices of two of the best

The best are taken from different structures, because variants of one would crowd out the others.
A language model gets at most three slots in ten; Centaur (arXiv 2603.24647) found more to be worse.
A model that only ranks gets slots of TPE once its skill is found; until then the search is the same
as without a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from random import Random

from offline_search.candidates.components import Choice, structure
from offline_search.candidates.proposal import Draft, assemble_state
from offline_search.candidates.search_space import (
    RandomSource,
    choices_of_state,
    sample_proposal,
)
from offline_search.evaluation.history import History, Trial
from offline_search.ledger.records import Attempt
from offline_search.proposers.prompt import ranking_prompt
from offline_search.proposers.proposal_client import ProposalRequest
from offline_search.settings import Library, Settings, Space
from offline_search.strategies.ranking_skill import SHORTLIST_SIZE, RankingSkill
from offline_search.strategies.sampling import TpeStudy, sample_draft
from offline_search.strategies.start_states import minimal_state, warm_start_states
from offline_search.strategies.strategy import Round, request_improvements
from vllm_autoprune.tpdsl.states.state import PruningState

_BEST_STRUCTURES = 5
"""Structures that further candidates are derived from, each represented by its best trial."""

_MODEL_SHARE = 0.3
"""Share of a round's slots that a language model gets."""

_SHOWN_BEST = 3
"""Measured candidates that it is shown beside them."""

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
        self._skill = RankingSkill(settings.seed)

    async def propose(self, current: Round) -> list[Draft]:
        """Proposals of the model, then warm starts, then derived candidates.

        In place of the last there are random states until something is measured.
        """
        best = _best_of_each_structure(current.history.ranked())
        writes = self._settings.proposals_per_reply > 1 or (best and not self._settings.menu)
        written_count = self._model_slots(current) if writes else 0
        slots = current.count - written_count
        # Without a race a round has few slots, and warm starts alone would fill several rounds.
        warm_starts = self._take_warm_starts(slots // 2 if best else slots)
        slots -= len(warm_starts)
        derived = (
            await self._derive(current, slots, best) if best else self._draw_random(current, slots)
        )
        return [*await self._request_states(current, written_count), *warm_starts, *derived]

    def _model_slots(self, current: Round) -> int:
        return int(_MODEL_SHARE * current.count) if self.uses_proposer else 0

    def _take_warm_starts(self, count: int) -> list[Draft]:
        """The next warm starts: those for which earlier rounds had no slot."""
        states, self._warm_starts = self._warm_starts[:count], self._warm_starts[count:]
        return [Draft("warm start", state) for state in states]

    def _draw_random(self, current: Round, count: int) -> list[Draft]:
        source = RandomSource(current.rng)
        return [sample_draft("random", source, self._settings) for _ in range(count)]

    async def _derive(self, current: Round, count: int, best: Sequence[Trial]) -> list[Draft]:
        """Candidates that follow from what is measured, some chosen by a model that ranks."""
        origins = _spread_origins(count)
        ranked = min(self._model_slots(current), origins.count("tpe")) if self._settings.menu else 0
        if ranked and not await self._has_skill(current, best):
            ranked = 0
        for _ in range(ranked):
            origins.remove("tpe")
        study = self._build_study(current.history, current.rng)
        drafts = [self._sample(origin, study, best, current.rng) for origin in origins]
        shortlists = [self._suggest_shortlist(study) for _ in range(ranked)]
        choices = await asyncio.gather(
            *(self._choose(current, number, one, best) for number, one in enumerate(shortlists))
        )
        return [*choices, *drafts]

    async def _request_states(self, current: Round, count: int) -> list[Draft]:
        example = minimal_state(self._settings)
        return await request_improvements(current, self._settings, count, example)

    async def _has_skill(self, current: Round, best: Sequence[Trial]) -> bool:
        """Whether the model ranks better than by chance, as far as is known by now."""

        def request_choice(number: int, shortlist: Sequence[Trial]) -> Awaitable[int | None]:
            names = {trial.name for trial in shortlist}
            others = [trial for trial in best if trial.name not in names]
            states = [trial.require_state() for trial in shortlist]
            return self._request_choice(current, number, others, states, "skill")

        return await self._skill.is_found(current, request_choice)

    def _suggest_shortlist(self, study: TpeStudy) -> list[Draft]:
        """Suggestions of TPE for one of its slots."""
        return [
            sample_draft("ranked", study.suggest(), self._settings) for _ in range(SHORTLIST_SIZE)
        ]

    async def _choose(
        self, current: Round, number: int, shortlist: Sequence[Draft], best: Sequence[Trial]
    ) -> Draft:
        """The draft of a shortlist that the model ranks first; the first one without a reply."""
        states = [draft.state for draft in shortlist if draft.state is not None]
        choice = await self._request_choice(current, number, best, states, "first")
        return shortlist[choice or 0]

    def _request_choice(
        self,
        current: Round,
        number: int,
        best: Sequence[Trial],
        states: Sequence[PruningState],
        attempt: Attempt,
    ) -> Awaitable[int | None]:
        """Index of the state that the model chooses, which is shown some of the best."""
        messages = ranking_prompt(self._settings, best[:_SHOWN_BEST], states)
        request = ProposalRequest(current.number, number, messages, "ranked")
        return current.client.request_choice(request, len(states), attempt)

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
