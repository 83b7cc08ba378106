"""Strategies that leave every decision to a language model that writes states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from offline_search.candidates import Draft, minimal_state
from offline_search.components import SelectionProgram
from offline_search.history import Trial
from offline_search.prompt import (
    INITIAL_PROGRAM,
    crossover_prompt,
    describe_code_task,
    extract_program,
    program_crossover_prompt,
    program_prompt,
    proposal_prompt,
)
from offline_search.proposer import ProposalClient, ProposalRequest
from offline_search.settings import Settings
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.strategy import Round, parent_names, request_improvements

_PARENTS = 2
_POPULATION_SIZE = 10


class AutoPrune:
    """`autoprune`: Algorithm 2 of the paper; the model sees the best candidate and the summary."""

    uses_proposer = True
    stops_early = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """All candidates of the round by the model."""
        default = minimal_state(self._settings)
        return await request_improvements(current, self._settings, current.count, default)


class EvoPrompting:
    """`evoprompting-states`: the model crosses two parents, drawn by rank from the best trials.

    The first generation is proposed without history, until there are enough parents.
    """

    uses_proposer = True
    stops_early = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent requests, each with its own pair of parents."""
        population = current.history.ranked()[:_POPULATION_SIZE]
        request = self._cross if len(population) >= _PARENTS else self._initialize
        return list(
            await asyncio.gather(
                *[request(current, index, population) for index in range(current.count)]
            )
        )

    def _initialize(
        self, current: Round, index: int, population: Sequence[Trial]
    ) -> Awaitable[Draft]:
        example = minimal_state(self._settings)
        messages = proposal_prompt(self._settings, "", example, index, current.count)
        request = ProposalRequest(current.number, index, messages, "llm")
        return current.client.request_proposal(request)

    def _cross(self, current: Round, index: int, population: Sequence[Trial]) -> Awaitable[Draft]:
        parents = draw_parents(population, current.rng)
        messages = crossover_prompt(self._settings, parents)
        names = parent_names(*parents)
        request = ProposalRequest(current.number, index, messages, "crossover", names)
        return current.client.request_proposal(request)


def draw_parents(population: Sequence[Trial], rng: Random) -> list[Trial]:
    """Two different parents, each with a probability inverse to its rank."""
    first = _draw_by_rank(population, rng)
    return [first, _draw_by_rank([trial for trial in population if trial is not first], rng)]


def _draw_by_rank(population: Sequence[Trial], rng: Random) -> Trial:
    return rng.choices(population, [1 / (1 + rank) for rank in range(len(population))])[0]


class OpenEvolveCode(OpenEvolve):
    """`openevolve-code`: OpenEvolve changes a program that selects tokens."""

    def _initial_program(self) -> Draft:
        selection = SelectionProgram(INITIAL_PROGRAM)
        return Draft("initial", None, program=selection.code, selection=selection)

    def _system_prompt(self) -> str:
        return f"{describe_code_task(self._settings)}\n\nYou improve such a program."

    def _request(
        self, client: ProposalClient, request: ProposalRequest, extract: Callable[[str], str]
    ) -> Awaitable[Draft]:
        return client.request_selection(request, extract)


class EvoPromptingCode(EvoPrompting):
    """`evoprompting-code`: the model crosses two programs, drawn by rank from the best trials."""

    def _initialize(
        self, current: Round, index: int, population: Sequence[Trial]
    ) -> Awaitable[Draft]:
        messages = program_prompt(self._settings, INITIAL_PROGRAM, index, current.count)
        request = ProposalRequest(current.number, index, messages, "llm")
        return current.client.request_selection(request, extract_program)

    def _cross(self, current: Round, index: int, population: Sequence[Trial]) -> Awaitable[Draft]:
        parents = draw_parents(population, current.rng)
        messages = program_crossover_prompt(self._settings, parents)
        names = parent_names(*parents)
        request = ProposalRequest(current.number, index, messages, "crossover", names)
        return current.client.request_selection(request, extract_program)
