"""What a search will ask for, before it asks: the prompt, calls, tokens, money, answers.

Knows nothing about endpoints beyond their price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offline_search.choosing import FRONT
from offline_search.examples import Dataset
from offline_search.prompt import Messages, propose
from offline_search.proposers.endpoint import Price
from offline_search.records import Split
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.starts import plain_state

_CHARACTERS = 3.5
"""Of English and JSON in a token, roughly."""

_REPLY = 300
"""Tokens of a proposal, roughly; and what a history adds to a prompt is about four of these."""


@dataclass(frozen=True)
class Estimate:
    """Upper bounds, but for repairs: a proposal that is not valid is asked for twice."""

    messages: Messages
    calls: int
    prompt_tokens: int
    completion_tokens: int
    money: float
    answers: Mapping[Split, int]


def estimate(settings: Settings, dataset: Dataset, price: Price) -> Estimate:
    """What the settings would cost at this price on this data."""
    strategy = STRATEGIES[settings.strategy](settings)
    messages = propose(
        settings, "(the history comes here)", plain_state(settings), 0, settings.per_round
    )
    calls = settings.candidates if strategy.asks else 0
    length = sum(len(message["content"]) for message in messages) / _CHARACTERS
    prompt = round(calls * (length + 4 * _REPLY))
    written = calls * _REPLY
    each = {split: len(dataset.of(split)) for split in ("search", "validation", "test")}
    budgets = len(settings.budgets)
    return Estimate(
        messages=messages,
        calls=calls,
        prompt_tokens=prompt,
        completion_tokens=written,
        money=price.of(prompt, written),
        answers={
            # The full-token model and the base policy are measured beside the candidates.
            "search": each["search"] * (1 + budgets * (settings.candidates + 1)),
            "validation": each["validation"] * (1 + budgets * (settings.confirmed + 1)),
            "test": each["test"] * (1 + budgets * (2 + (FRONT if settings.several else 0))),
        },
    )
