"""Base class of strategies, and strategies that leave every decision to a language model."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from offline_search.candidates import Draft, Stage, list_purposes, minimal_state
from offline_search.history import History, Trial
from offline_search.prompt import (
    crossover_prompt,
    describe_field,
    describe_request,
    proposal_prompt,
)
from offline_search.proposer import ProposalClient, ProposalRequest
from offline_search.settings import Settings


@dataclass(frozen=True)
class Round:
    """Input of one round: history H_(t-1), a random generator, and the proposer."""

    number: int
    count: int
    history: History
    context: str
    """Text of prompts before a request: facts about the images, and the summary of the history."""
    rng: Random
    client: ProposalClient
    tied: frozenset[tuple[str, ...]]
    """Structures of tied leaders, which the optimizer avoids."""
    position: str
    """Sentences of prompts that say which round of the search this is."""
    stage: Stage
    """Stage of the search, which determines the purposes of proposals."""

    async def request(self, requests: Iterable[ProposalRequest]) -> list[Draft]:
        """Send requests concurrently; returns the drafts in their replies, in order of requests."""
        replies = await asyncio.gather(*map(self.client.request, requests))
        return [draft for drafts in replies for draft in drafts]

    async def request_improvements(
        self, settings: Settings, count: int, others: Sequence[Draft] = ()
    ) -> list[Draft]:
        """Request the first ``count`` drafts of a round, one by one or in lists.

        A draft has to improve on the best trial, or on the simplest state if none is measured yet.
        Requests are concurrent, share a prompt prefix, and are batched by the endpoint. Purposes
        continue from list to list, over all rounds. ``others`` compete with the drafts.
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
            field = describe_field(max(length, 1), count, others)
            messages = proposal_prompt(
                settings, self.context, example, f"{self.position} {field} {request}"
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

    Proposals must depend only on settings, history and random generator, so that a search that is
    run again on its ledger makes the same proposals.
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
        """Draw ``count`` trials by inverse rank among the ``top`` not drawn yet.

        They repeat if there are fewer.
        """
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
        """Request all candidates of the round from the model."""
        return await current.request_improvements(self._settings, current.count)


class _EvoPrompting(Strategy, name="evoprompting"):
    """`evoprompting`: the model crosses two parents, drawn by rank from the best.

    Until there are enough parents, candidates are proposed without history.
    """

    async def propose(self, current: Round) -> list[Draft]:
        """Request candidates concurrently; every request has its own pair of parents."""
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
