"""Cost estimate of a search before it starts: prompt, calls, tokens, money, answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offline_search.candidates.hypothesis import list_purposes
from offline_search.dataset import SPLITS, Dataset, Split
from offline_search.proposers.endpoint import Price
from offline_search.proposers.prompt import Messages, list_prompt, proposal_prompt
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.start_states import minimal_state
from offline_search.strategies.strategy import RACED_PER_PLACE, maximum_rounds

_CHARACTERS_PER_TOKEN = 3.5
"""Approximate, for English and JSON."""

_REPLY_TOKENS = 300
"""Approximate tokens of a proposal; the history adds about four times as many to a prompt."""


@dataclass(frozen=True)
class CostEstimate:
    """Upper bounds of calls and answers without repairs; rough averages of tokens and money.

    ``reply`` says what a reply holds.
    """

    messages: Messages
    reply: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    money: float
    answers: Mapping[Split, int]


def _prompt(settings: Settings) -> Messages:
    """The first prompt, with a placeholder for the history."""
    history, example = "(the history comes here)", minimal_state(settings)
    total = settings.per_round
    if settings.proposals_per_reply == 1:
        return proposal_prompt(settings, history, example, 0, total)
    count = min(settings.proposals_per_reply, total)
    purposes = list_purposes(0, count, measured=True)
    return list_prompt(settings, history, example, 0, count, total, purposes)


def estimate_cost(settings: Settings, dataset: Dataset, price: Price) -> CostEstimate:
    """Cost of a search at a price on a data set."""
    strategy = STRATEGIES[settings.strategy](settings)
    messages = _prompt(settings)
    # Proposals that repeat earlier ones cost a call and no evaluation, so there may be more calls.
    rounds = maximum_rounds(settings, strategy)
    proposals = settings.per_round if strategy.uses_proposer else 0
    if settings.race and not strategy.stops_early:  # `autoprune+` asks for three slots in ten
        proposals *= RACED_PER_PLACE
    listed = settings.proposals_per_reply
    calls = rounds * math.ceil(proposals / listed)
    length = sum(len(message["content"]) for message in messages) / _CHARACTERS_PER_TOKEN
    prompt_tokens = round(calls * (length + 4 * _REPLY_TOKENS))
    completion_tokens = rounds * proposals * _REPLY_TOKENS
    size = {split: len(dataset.examples(split)) for split in SPLITS}
    budgets = len(settings.budgets)
    return CostEstimate(
        messages=messages,
        reply="one proposal" if listed == 1 else f"up to {listed} proposals",
        calls=calls,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        money=price.cost(prompt_tokens, completion_tokens),
        answers={
            # The unpruned model and the base policy are measured as well as the candidates.
            "search": size["search"] * (1 + budgets * (settings.total_candidates + 1)),
            "validation": size["validation"] * (1 + budgets * (settings.confirmed + 1)),
            "test": size["test"] * (1 + budgets * 2),
        },
    )
