"""Strategy protocol, and what a strategy is given in each round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from offline_search.candidates import PURPOSES, Draft, list_purposes
from offline_search.history import History, Trial
from offline_search.prompt import list_prompt, proposal_prompt
from offline_search.proposer import ProposalClient, ProposalRequest
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.state import PruningState


@dataclass(frozen=True)
class Round:
    """Input of one round: history H_(t-1), its summary, a random generator, and the proposer."""

    number: int
    count: int
    history: History
    summary: str
    rng: Random
    client: ProposalClient


class Strategy(Protocol):
    """Proposes the candidates of a search, round by round.

    Proposals must follow from settings, history and random generator alone, so that a search that
    is run again on its ledger makes the same ones.
    """

    @property
    def uses_proposer(self) -> bool:
        """Whether the strategy sends requests to a language model."""

    @property
    def stops_early(self) -> bool:
        """Whether candidates that are significantly behind are dropped before the last example."""

    async def propose(self, current: Round) -> list[Draft]:
        """The drafts of a round, at most ``current.count``."""


RACED_PER_PLACE = 3
"""Candidates that are proposed for each of a round's m places where candidates are raced."""

_MAX_ROUNDS_FACTOR = 4
"""A search with a fixed number of evaluations runs at most this many times T rounds."""


def has_fixed_evaluations(settings: Settings, strategy: Strategy) -> bool:
    """Whether rounds go on until T x m evaluations are spent, instead of ending after T rounds."""
    return settings.equal_evaluations or races(settings, strategy)


def races(settings: Settings, strategy: Strategy) -> bool:
    """Whether candidates are dropped after a part of the examples, and more of them proposed."""
    return settings.race or strategy.stops_early


def maximum_rounds(settings: Settings, strategy: Strategy) -> int:
    """The largest number of rounds that a search may take."""
    factor = _MAX_ROUNDS_FACTOR if has_fixed_evaluations(settings, strategy) else 1
    return settings.rounds * factor


async def request_improvements(
    current: Round, settings: Settings, count: int, default: PruningState
) -> list[Draft]:
    """Request the first ``count`` drafts of a round, one by one or in lists.

    Requests are concurrent, share their prompt, and are batched by the endpoint.
    """
    size = settings.proposals_per_reply
    if size == 1:
        requests = [
            _request_improvement(current, settings, index, default) for index in range(count)
        ]
        return list(await asyncio.gather(*requests))
    lists = [
        _request_list(current, settings, first, min(size, count - first), count, default)
        for first in range(0, count, size)
    ]
    return [draft for drafts in await asyncio.gather(*lists) for draft in drafts]


def _request_list(
    current: Round, settings: Settings, first: int, count: int, total: int, default: PruningState
) -> Awaitable[list[Draft]]:
    """Request a list whose purposes follow those of the lists before it, over all rounds."""
    history = current.history
    best = history.best()
    start = ((current.number - 1) * total + first) % len(PURPOSES)
    purposes = list_purposes(start, count, measured=best is not None)
    example = default if best is None else best.state or default
    messages = list_prompt(settings, current.summary, example, first, count, total, purposes)
    request = ProposalRequest(current.number, first, messages, "llm", parent_names(best))
    names = {one.name for one in history.trials if history.values_of(one.name) is not None}
    return current.client.request_list(request, count, names)


def _request_improvement(
    current: Round, settings: Settings, index: int, default: PruningState
) -> Awaitable[Draft]:
    """Request a proposal that improves on the best trial, or on a default state without trials."""
    best = current.history.best()
    example = default if best is None else best.state or default
    messages = proposal_prompt(settings, current.summary, example, index, current.count)
    request = ProposalRequest(current.number, index, messages, "llm", parent_names(best))
    return current.client.request_proposal(request)


def parent_names(*parents: Trial | None) -> tuple[str, ...]:
    """Names of the trials that a candidate is derived from."""
    return tuple(parent.name for parent in parents if parent is not None)
