"""What needs no server: the replay of a recorded search, and the cost of one before it starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offline_search.candidates import list_purposes, minimal_state
from offline_search.components import JsonObject
from offline_search.dataset import SPLITS, Dataset, Split
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from offline_search.ledger import (
    Cost,
    Ledger,
    Record,
    SettingsRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
)
from offline_search.prompt import Messages, list_prompt, proposal_prompt
from offline_search.proposer import Reply
from offline_search.search import Search
from offline_search.settings import RACED_PER_PLACE, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import VisualTokens


class UnavailableBackend:
    """Evaluator and proposer that fail every request, because a replay needs none of them."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name = name
        self.dataset = dataset

    def probes(self) -> Sequence[VisualTokens]:
        """No probes, because fingerprints of selections are recorded."""
        return ()

    async def prepare(self) -> None:
        """Always succeeds."""

    async def close(self) -> None:
        """Does nothing."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Raises :class:`SearchError`."""
        raise SearchError(
            f"the recording has no evaluation of examples {job.start} to {job.stop} of the "
            f"{job.split} split at K = {job.budget} -> resume the recorded search to its end first"
        )

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Raises :class:`SearchError`."""
        raise SearchError(
            "the recording has no reply to this request -> resume the recorded search to its end"
        )


async def replay(recording: Path, into: Path, dataset: Dataset) -> tuple[WinnerRecord, str, str]:
    """Replay a recording into a new ledger; returns the winner and the digests of both ledgers.

    The recording is only read. Raises :class:`SearchError` if it was made on other data, or if a
    step needs a request that was not recorded.
    """
    recorded = read_ledger(recording)
    settings = recorded_settings(recording, recorded)
    # Every evaluator of the package and of the benchmarks ends its name so; others are not checked.
    named = re.search(r"data ([0-9a-f]{12})$", settings.evaluator)
    if named is not None and not dataset.digest.startswith(named[1]):
        raise SearchError(
            f"ledger {recording}: its search had other questions than {dataset.folder} gives "
            f"(data {named[1]}, not {dataset.digest[:12]}) -> give the data folder and the "
            "--images of the recorded search"
        )
    backend = UnavailableBackend(settings.evaluator, dataset)
    with Ledger(into, recorded) as ledger:
        winner = await Search(settings, ledger, backend, backend).run()
        return winner, digest_records(recorded), ledger.digest()


def recorded_settings(path: Path, records: Sequence[Record]) -> Settings:
    """The settings of the search whose ledger at ``path`` has these records."""
    for record in records:
        if isinstance(record, SettingsRecord):
            return record.settings
    raise SearchError(f"ledger {path}: contains no search -> give one that has begun")


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
    cost: Cost
    answers: Mapping[Split, int]


def estimate_cost(settings: Settings, dataset: Dataset, price: tuple[float, float]) -> CostEstimate:
    """Cost of a search on a data set at the price of a million tokens of prompts and replies."""
    strategy = STRATEGIES[settings.strategy](settings)
    history, example = "(the history comes here)", minimal_state(settings)
    listed, total = settings.proposals_per_reply, settings.per_round
    count = min(listed, total)
    purposes = list_purposes(0, count, measured=True)
    messages = (
        proposal_prompt(settings, history, example, 0, total)
        if listed == 1
        else list_prompt(settings, history, example, 0, count, total, purposes)
    )
    # Proposals that repeat earlier ones cost a call and no evaluation, so there may be more calls.
    rounds = settings.maximum_rounds
    proposals = settings.per_round if strategy.uses_proposer else 0
    if (
        settings.race and settings.strategy != "autoprune+"
    ):  # `autoprune+` asks for three slots in ten
        proposals *= RACED_PER_PLACE
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
        cost=Cost.at(price, prompt_tokens, completion_tokens),
        answers={
            # The unpruned model and the base policy are measured as well as the candidates.
            "search": size["search"] * (1 + budgets * (settings.total_candidates + 1)),
            "validation": size["validation"] * (1 + budgets * (settings.confirmed + 1)),
            "test": size["test"] * (1 + budgets * 2),
        },
    )
