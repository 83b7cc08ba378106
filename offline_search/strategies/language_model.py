"""What a strategy is, and those that leave every decision to a language model."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from offline_search.candidates import Draft, Stage, list_purposes, minimal_state
from offline_search.history import History, Trial
from offline_search.prompt import crossover_prompt, describe_request, proposal_prompt
from offline_search.proposer import ProposalClient, ProposalRequest
from offline_search.settings import Settings


@dataclass(frozen=True)
class Round:
    """Input of one round: history H_(t-1), a random generator, and the proposer."""

    number: int
    count: int
    history: History
    context: str
    """What prompts say before a request: facts of the images, and the summary of the history."""
    rng: Random
    client: ProposalClient
    tied: frozenset[tuple[str, ...]]
    """Structures that the optimizer leaves, because leaders of them are tied."""
    position: str
    """Which round of the search this is, for prompts."""
    stage: Stage
    """What proposals of a language model are asked for."""

    async def request(self, requests: Iterable[ProposalRequest]) -> list[Draft]:
        """The drafts in the replies to concurrent requests, in their order."""
        replies = await asyncio.gather(*map(self.client.request, requests))
        return [draft for drafts in replies for draft in drafts]

    async def request_improvements(self, settings: Settings, count: int) -> list[Draft]:
        """Request the first ``count`` drafts of a round, one by one or in lists.

        Each improves on the best trial, or on the simplest state before one is measured. Requests
        are concurrent, share their prompt, and are batched by the endpoint. The purposes of a list
        follow those of the lists before it, over all rounds.
        """
        history = self.history
        best = history.best()
        example = best or minimal_state(settings)
        parents = () if best is None else (best.name,)
        size = settings.proposals_per_reply
        names = {
            trial.name
            for trial in history.trials
            if history.values_of(trial.name) is not None
        }
        requests = []
        for begin in range(0, count, size):
            length = 0
            purposes = list[str]()
            if size > 1:
                length = min(size, count - begin)
                start = (self.number - 1) * count + begin
                purposes = list_purposes(start, length, self.stage)
            request = describe_request(self.number, begin, self.stage, purposes)
            messages = proposal_prompt(
                settings, self.context, example, f"{self.position} {request}"
            )
            requests.append(
                ProposalRequest(
                    self.number, begin, messages, "llm", parents, length, names
                )
            )
        return await self.request(requests)


_PARENTS = 2
_POPULATION_SIZE = 10


class Strategy(ABC):
    """Proposes the candidates of a search, round by round.

    Proposals must follow from settings, history and random generator alone, so that a search that
    is run again on its ledger makes the same ones.
    """

    uses_proposer = True
    """Whether the strategy sends requests to a language model."""

    by_name: ClassVar[dict[str, type[Strategy]]] = {}

    def __init_subclass__(cls, name: str) -> None:
        cls.by_name[name] = cls

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    async def propose(self, current: Round) -> list[Draft]:
        """The drafts of a round, at most ``current.count``."""

    @staticmethod
    def draw_parents(
        ranked: Sequence[Trial], count: int, rng: Random, top: int = _POPULATION_SIZE
    ) -> list[Trial]:
        """Different trials, each drawn by inverse rank among the ``top`` of those that are left."""
        parents: list[Trial] = []
        for _ in range(count):
            remaining = [trial for trial in ranked if trial not in parents] or ranked
            population = remaining[:top]
            parents += rng.choices(
                population, [1 / (1 + rank) for rank in range(len(population))]
            )
        return parents


class _AutoPrune(Strategy, name="autoprune"):
    """`autoprune`: Algorithm 2 of the paper; the model sees the best candidate and the summary."""

    async def propose(self, current: Round) -> list[Draft]:
        """All candidates of the round by the model."""
        return await current.request_improvements(self._settings, current.count)


class _EvoPrompting(Strategy, name="evoprompting"):
    """`evoprompting`: the model crosses two parents, drawn by rank from the best.

    The first generation is proposed without history, until there are enough parents.
    """

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent requests, each with its own pair of parents."""
        settings = self._settings
        count = current.count
        number = current.number
        population = current.history.ranked()[:_POPULATION_SIZE]
        requests = []
        for index in range(count):
            origin = "llm"
            parents = list[Trial]()
            if len(population) >= _PARENTS:
                origin = "crossover"
                parents = self.draw_parents(population, _PARENTS, current.rng)
                messages = crossover_prompt(settings, parents, current.history)
            else:
                request = describe_request(number, index)
                messages = proposal_prompt(
                    settings, "", minimal_state(settings), request
                )
            names = tuple(parent.name for parent in parents)
            requests.append(ProposalRequest(number, index, messages, origin, names))
        return await current.request(requests)
