"""Strategies that leave every decision to a language model, and its requests for improvements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from random import Random

from offline_search.candidates import PURPOSES, Draft, list_purposes, minimal_state
from offline_search.history import Trial
from offline_search.prompt import (
    crossover_prompt,
    extract_program,
    list_prompt,
    program_prompt,
    proposal_prompt,
)
from offline_search.proposer import ProposalRequest
from offline_search.settings import Settings
from offline_search.strategies.strategy import Round

_PARENTS = 2
_POPULATION_SIZE = 10


class AutoPrune:
    """`autoprune`: Algorithm 2 of the paper; the model sees the best candidate and the summary."""

    uses_proposer = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """All candidates of the round by the model."""
        return await request_improvements(current, self._settings, current.count)


class EvoPrompting:
    """`evoprompting-states`, `-code`: the model crosses two parents, drawn by rank from the best.

    The first generation is proposed without history, until there are enough parents.
    """

    uses_proposer = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent requests, each with its own pair of parents."""
        population = current.history.ranked()[:_POPULATION_SIZE]
        requests = [self._request(current, index, population) for index in range(current.count)]
        return list(await asyncio.gather(*requests))

    def _request(self, current: Round, index: int, population: Sequence[Trial]) -> Awaitable[Draft]:
        settings, origin, parents = self._settings, "llm", list[Trial]()
        if len(population) >= _PARENTS:
            origin, parents = "crossover", draw_parents(population, current.rng)
            messages = crossover_prompt(settings, parents)
        elif settings.writes_code:
            messages = program_prompt(settings, index, current.count)
        else:
            example = minimal_state(settings)
            messages = proposal_prompt(settings, "", example, index, current.count)
        names = tuple(parent.name for parent in parents)
        request = ProposalRequest(current.number, index, messages, origin, names)
        if settings.writes_code:
            return current.client.request_program(request, extract_program)
        return current.client.request_proposal(request)


def draw_parents(population: Sequence[Trial], rng: Random) -> list[Trial]:
    """Two different parents, each with a probability inverse to its rank."""
    parent = draw_by_rank(population, rng)
    return [parent, draw_by_rank([trial for trial in population if trial is not parent], rng)]


def draw_by_rank(population: Sequence[Trial], rng: Random) -> Trial:
    """One trial, with a probability inverse to its rank."""
    return rng.choices(population, [1 / (1 + rank) for rank in range(len(population))])[0]


async def request_improvements(current: Round, settings: Settings, count: int) -> list[Draft]:
    """Request the first ``count`` drafts of a round, one by one or in lists.

    Each improves on the best trial, or on the simplest state before one is measured. Requests are
    concurrent, share their prompt, and are batched by the endpoint. The purposes of a list follow
    those of the lists before it, over all rounds.
    """
    history, number, client = current.history, current.number, current.client
    best = history.best()
    example = (best and best.state) or minimal_state(settings)
    parents = () if best is None else (best.name,)
    size = settings.proposals_per_reply

    def request_one(index: int) -> Awaitable[Draft]:
        messages = proposal_prompt(settings, current.summary, example, index, current.count)
        return client.request_proposal(ProposalRequest(number, index, messages, "llm", parents))

    def request_list(begin: int) -> Awaitable[list[Draft]]:
        length = min(size, count - begin)
        start = ((number - 1) * count + begin) % len(PURPOSES)
        purposes = list_purposes(start, length, measured=best is not None)
        messages = list_prompt(settings, current.summary, example, begin, length, count, purposes)
        request = ProposalRequest(number, begin, messages, "llm", parents)
        known = {trial.name for trial in history.trials}
        names = {name for name in known if history.values_of(name) is not None}
        return client.request_list(request, length, names)

    if size == 1:
        return list(await asyncio.gather(*map(request_one, range(count))))
    lists = await asyncio.gather(*map(request_list, range(0, count, size)))
    return [draft for drafts in lists for draft in drafts]
