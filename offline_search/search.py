"""Search loop: Algorithm 2 of the paper, with every step recorded in a ledger.

    strategy ─ proposer ─> drafts ─> load ─> safety check ─> duplicates ─> evaluator ─> trials
        ^                                                                                 │
        └─────────────────────────── summary H_t <── history <────────────────────────────┘

Resuming and replaying need no code of their own: the loop runs again from its start and takes
completed steps from the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from offline_search.candidates import base_state
from offline_search.evaluator import Evaluator, RecordedEvaluator
from offline_search.history import History, Trial, gave_up
from offline_search.ledger import Cost, Ledger, SettingsRecord, SummaryRecord, WinnerRecord
from offline_search.proposer import ProposalClient, Proposer, SpendingLimits
from offline_search.rounds import RoundEvaluator
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.strategy import (
    RACED_PER_PLACE,
    Round,
    has_fixed_evaluations,
    maximum_rounds,
    races,
)
from offline_search.summary import summarize
from offline_search.winner import WinnerSelector
from vllm_autoprune.errors import SearchError


class SearchObserver(Protocol):
    """Receives the progress of a search; cannot influence it."""

    def on_start(self, history: History, examples: int) -> None:
        """The base policy is measured on this number of search examples."""

    def on_round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """A round is over; ``share`` of the search is done."""

    def on_finish(self, winner: WinnerRecord) -> None:
        """The search is over."""


@dataclass(frozen=True)
class Search:
    """One search; ``limits`` bound the cost of its proposer."""

    settings: Settings
    ledger: Ledger
    evaluator: Evaluator
    proposer: Proposer
    limits: SpendingLimits = field(default_factory=SpendingLimits)
    observer: SearchObserver | None = None

    async def run(self) -> WinnerRecord:
        """Run or resume the search; raises :class:`SearchError` if it cannot continue."""
        settings, ledger = self.settings, self.ledger
        require_same_settings(ledger, settings)
        ledger.put(SettingsRecord(settings=settings))
        strategy = STRATEGIES[settings.strategy](settings)
        base = base_state(settings)
        evaluator = RecordedEvaluator(ledger, self.evaluator, base.digest)
        dataset = self.evaluator.dataset
        examples = dataset.examples("search")
        rounds = RoundEvaluator(settings, ledger, evaluator, examples, self.evaluator.probes())
        selector = WinnerSelector(settings, evaluator, dataset, base)
        client = ProposalClient(settings, ledger, self.proposer, self.limits)
        history = await rounds.evaluate_baselines(base)
        await selector.evaluate_baselines()
        if self.observer is not None:
            self.observer.on_start(history, len(examples))
        budget = settings.total_candidates * len(examples) * len(settings.budgets)
        fixed_evaluations = has_fixed_evaluations(settings, strategy)
        summary = summarize(history)
        for number in range(1, maximum_rounds(settings, strategy) + 1):
            if fixed_evaluations and _count_answers(history) >= budget:
                break
            rng = Random(f"{settings.seed} {number}")
            count = settings.per_round
            if races(settings, strategy):
                # The last round is smaller, so that a race exceeds its budget by little.
                left = budget - _count_answers(history)
                full = len(examples) * len(settings.budgets)
                count = RACED_PER_PLACE * min(count, max(1, left // full))
            current = Round(number, count, history, summary, rng, client)
            drafts = await strategy.propose(current)
            trials = await rounds.evaluate_round(drafts, number, history, races(settings, strategy))
            history.trials += trials
            summary = summarize(history)
            ledger.put(SummaryRecord(round=number, text=summary))
            if self.observer is not None:
                done = _count_answers(history) / budget
                share = min(1.0, done if fixed_evaluations else number / settings.rounds)
                self.observer.on_round(number, trials, history, share, client.total_cost())
            if gave_up([trial.result for trial in history.trials]):
                break
        winner = ledger.put(await selector.select(history))
        if self.observer is not None:
            self.observer.on_finish(winner)
        return winner


def require_same_settings(ledger: Ledger, settings: Settings) -> None:
    """Raise :class:`SearchError` if a ledger belongs to a search with other settings."""
    known = ledger.find(SettingsRecord, "opened")
    if known is None or known.settings == settings:
        return
    before, now = dict(known.settings), dict(settings)
    differing = [
        f"{name} is {now[name]!r}, was {before[name]!r}"
        for name in before
        if before[name] != now[name]
    ]
    raise SearchError(
        f"ledger {ledger.path} belongs to another search ({'; '.join(differing)}) -> give the "
        "same settings again, or another ledger"
    )


def _count_answers(history: History) -> int:
    return sum(trial.result.examples for trial in history.trials)
