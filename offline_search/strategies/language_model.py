"""What a strategy is, and those that leave every decision to a language model.

A baseline of the paper evolves states, or as it was published Python code: a program
``select(features, signals, K)``, confined and measured on the tokens that it selects.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from random import Random

from offline_search.candidates import PURPOSES, Draft, list_purposes, minimal_state
from offline_search.history import History, Trial
from offline_search.prompt import (
    crossover_prompt,
    list_prompt,
    program_prompt,
    proposal_prompt,
)
from offline_search.proposer import ProposalClient, ProposalRequest
from offline_search.settings import Settings


@dataclass(frozen=True)
class Round:
    """Input of one round: history H_(t-1), its summary, a random generator, and the proposer."""

    number: int
    count: int
    history: History
    summary: str
    rng: Random
    client: ProposalClient


class Strategy(ABC):
    """Proposes the candidates of a search, round by round.

    Proposals must follow from settings, history and random generator alone, so that a search that
    is run again on its ledger makes the same ones.
    """

    uses_proposer = True
    """Whether the strategy sends requests to a language model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    async def propose(self, current: Round) -> list[Draft]:
        """The drafts of a round, at most ``current.count``."""


class AutoPrune(Strategy):
    """`autoprune`: Algorithm 2 of the paper; the model sees the best candidate and the summary."""

    async def propose(self, current: Round) -> list[Draft]:
        """All candidates of the round by the model."""
        return await request_improvements(current, self._settings, current.count)


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


_PARENTS = 2
_POPULATION_SIZE = 10


class EvoPrompting(Strategy):
    """`evoprompting-states`, `-code`: the model crosses two parents, drawn by rank from the best.

    The first generation is proposed without history, until there are enough parents.
    """

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent requests, each with its own pair of parents."""
        settings, count, client = self._settings, current.count, current.client
        population = current.history.ranked()[:_POPULATION_SIZE]
        drafts = []
        for index in range(count):
            origin, parents = "llm", list[Trial]()
            if len(population) >= _PARENTS:
                origin, parents = "crossover", draw_parents(population, _PARENTS, current.rng)
                messages = crossover_prompt(settings, parents)
            elif settings.writes_code:
                messages = program_prompt(settings, index, count)
            else:
                messages = proposal_prompt(settings, "", minimal_state(settings), index, count)
            names = tuple(parent.name for parent in parents)
            request = ProposalRequest(current.number, index, messages, origin, names)
            drafts.append(
                client.request_program(request, _extract_program)
                if settings.writes_code
                else client.request_proposal(request)
            )
        return list(await asyncio.gather(*drafts))


_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


def _extract_program(reply: str) -> str:
    """The program in a reply, fenced or not; raises :class:`ValueError` if there is none."""
    for block in _FENCED.findall(reply) or [reply]:
        if "def select(" in block:
            return f"{block.strip()}\n"
    raise ValueError("the reply defines no function select(features, signals, K)")


def draw_parents(
    ranked: Sequence[Trial], count: int, rng: Random, top: int = _POPULATION_SIZE
) -> list[Trial]:
    """Different trials, each drawn by inverse rank among the ``top`` of those that are left."""
    parents: list[Trial] = []
    for _ in range(count):
        remaining = [trial for trial in ranked if trial not in parents] or ranked
        population = remaining[:top]
        parents += rng.choices(population, [1 / (1 + rank) for rank in range(len(population))])
    return parents
