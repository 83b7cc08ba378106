"""Search loop: Algorithm 2 of the paper, with every step recorded in a ledger.

    strategy ─ proposer ─> drafts ─> load ─> safety check ─> duplicates ─> evaluator ─> trials
        ^                                                                                 │
        └─────────────────────────── summary H_t <── history <────────────────────────────┘

Resuming and replaying need no code of their own: the loop runs again from its start and takes
completed steps from the ledger.

The winner is the best candidate by search and validation examples together: the search split alone
overestimates candidates that were lucky on it, and the validation split alone is a smaller sample.
It is reported on the test split, beside the base policy on the same examples.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from offline_search.candidates import base_state
from offline_search.components import Candidate
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob, Evaluator, RecordedEvaluator
from offline_search.history import (
    FAILURES_TO_GIVE_UP,
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    bootstrap_mean,
    describe_objective,
    gave_up,
    mme_total,
    relative_values,
)
from offline_search.ledger import (
    Comparison,
    Cost,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    WinnerRecord,
)
from offline_search.prompt import summarize
from offline_search.proposer import ProposalClient, Proposer, SpendingLimits
from offline_search.report import describe_leader, format_interval
from offline_search.rounds import RoundEvaluator
from offline_search.settings import RACED_PER_PLACE, Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.strategy import Round
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.state import PruningState


class ProgressLog:
    """Writes one line a round, and one line for each candidate that was not evaluated."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write = write
        self._clock = clock
        self._created = clock()
        self._rounds_started = self._created
        self._leader: str | None = None

    def on_start(self, history: History, examples: int) -> None:
        """Write the base policy's objective."""
        base = history.base.objective or 0.0
        elapsed = self._clock() - self._created
        self._write(f"base policy {base:+.4f} on {examples} examples ({elapsed:.0f} s)")
        self._rounds_started = self._clock()

    def on_round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """Write the results of a round, the best so far, and the remaining time."""
        best, leader = history.best(), "no leader on the search split"
        self._leader = None if best is None else best.name
        if best is not None:
            origin = best.proposal.origin
            leader = f"{best.name} by {origin} leads on the search split, {best.score:+.4f}"
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        remaining = "time left unknown"
        if share > 0:
            seconds = (self._clock() - self._rounds_started) * (1 - share) / share
            duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            remaining = f"{duration} left"
        self._write(f"{share:4.0%} round {number}: {statuses}; {leader}{tokens}, {remaining}")
        for trial in trials:
            status, reason = trial.result.status, trial.result.reason
            if status in ("invalid", "unsafe", "unevaluated"):
                self._write(f"       {trial.name} {status}: {reason[:120]}")
        if gave_up([trial.result for trial in history.trials]):
            count = FAILURES_TO_GIVE_UP
            self._write(f"gives up: the last {count} candidates were invalid or unsafe")

    def on_finish(self, winner: WinnerRecord) -> None:
        """Write the winner's scores on the test split, and whether it led the search."""
        test = winner.test
        self._write(
            f"winner {winner.winner}: test objective {format_interval(test.objective)}, gain over "
            f"the base policy {format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if self._leader is not None:
            self._write(describe_leader(winner, self._leader))


@dataclass(frozen=True)
class Search:
    """One search; ``limits`` bound the cost of its proposer, ``observer`` is told."""

    settings: Settings
    ledger: Ledger
    evaluator: Evaluator
    proposer: Proposer
    limits: SpendingLimits = field(default_factory=SpendingLimits)
    observer: ProgressLog | None = None

    async def run(self) -> WinnerRecord:
        """Run or resume the search; raises :class:`SearchError` if it cannot continue."""
        settings, ledger = self.settings, self.ledger
        known = ledger.find(SettingsRecord, "opened")
        if known is not None and known.settings != settings:
            before, now = dict(known.settings), dict(settings)
            differing = [
                f"{name} is {now[name]!r}, was {before[name]!r}"
                for name in before
                if before[name] != now[name]
            ]
            raise SearchError(
                f"ledger {ledger.path} belongs to another search ({'; '.join(differing)}) -> give "
                "the same settings again, or another ledger"
            )
        ledger.put(SettingsRecord(settings=settings))
        strategy = STRATEGIES[settings.strategy](settings)
        base = base_state(settings)
        evaluator = RecordedEvaluator(ledger, self.evaluator, base.digest)
        dataset = self.evaluator.dataset
        examples = dataset.examples("search")
        rounds = RoundEvaluator(settings, ledger, evaluator, examples, self.evaluator.probes())
        selector = _WinnerSelector(settings, evaluator, dataset, base)
        client = ProposalClient(settings, ledger, self.proposer, self.limits)
        history = await rounds.evaluate_baselines(base)
        await selector.evaluate_baselines()
        if self.observer is not None:
            self.observer.on_start(history, len(examples))
        budget = settings.total_candidates * len(examples) * len(settings.budgets)
        summary = summarize(history)
        for number in range(1, settings.maximum_rounds + 1):
            if settings.has_fixed_evaluations and _count_answers(history) >= budget:
                break
            rng = Random(f"{settings.seed} {number}")
            count = settings.per_round
            if settings.races:
                # The last round is smaller, so that a race exceeds its budget by little.
                unspent = budget - _count_answers(history)
                full = len(examples) * len(settings.budgets)
                count = RACED_PER_PLACE * min(count, max(1, unspent // full))
            current = Round(number, count, history, summary, rng, client)
            drafts = await strategy.propose(current)
            trials = await rounds.evaluate_round(drafts, number, history, settings.races)
            history.trials += trials
            summary = summarize(history)
            ledger.put(SummaryRecord(round=number, text=summary))
            if self.observer is not None:
                done = _count_answers(history) / budget
                share = min(
                    1.0, done if settings.has_fixed_evaluations else number / settings.rounds
                )
                self.observer.on_round(number, trials, history, share, client.total_cost())
            if gave_up([trial.result for trial in history.trials]):
                break
        winner = ledger.put(await selector.select(history))
        if self.observer is not None:
            self.observer.on_finish(winner)
        return winner


def _count_answers(history: History) -> int:
    return sum(trial.result.examples for trial in history.trials)


class NothingMeasured(SearchError):
    """No candidate of a search was measured on the whole search split."""


@dataclass(frozen=True)
class _WinnerSelector:
    """Measures the best candidates on the validation and test splits."""

    settings: Settings
    evaluator: RecordedEvaluator
    dataset: Dataset
    base: PruningState

    async def evaluate_baselines(self) -> None:
        """Measure the unpruned model and the base policy on both splits.

        Before the search, because a question that cannot be asked would otherwise be found at its
        end. Raises :class:`BaselineFailed`.
        """
        splits: tuple[Split, ...] = ("validation", "test")
        for split in splits:
            await self._compare(self.base, split)

    async def select(self, history: History) -> WinnerRecord:
        """The winner; raises :class:`SearchError` if no candidate was measured to the end."""
        candidates = {trial.name: trial for trial in history.ranked()[: self.settings.confirmed]}
        if not candidates:
            raise NothingMeasured(
                "no candidate was evaluated to the end -> `vllm-autoprune search report` has the "
                "reasons; fix them and begin a new ledger"
            )
        confirmed: dict[str, Comparison] = {}
        for name, trial in candidates.items():
            with contextlib.suppress(EvaluationFailed):
                confirmed[name] = await self._compare(trial.require_candidate(), "validation")
        if not confirmed:
            raise SearchError(
                "none of the best candidates could be measured on the validation split -> "
                "look at the server's log and begin a new ledger"
            )
        # Objectives over search and validation examples together, without shrinkage towards the
        # mean: all candidates have the same examples, so it would not change their order.
        searched, estimates = len(self.dataset.examples("search")), {}
        for name, validation in confirmed.items():
            total = searched * candidates[name].score
            total += validation.examples * validation.objective.value
            estimates[name] = round(total / (searched + validation.examples), 6)
        ranked, test, failure = sorted(estimates, key=lambda name: -estimates[name]), None, ""
        for name in ranked:
            try:
                test = await self._compare(candidates[name].require_candidate(), "test")
                break
            except EvaluationFailed as error:
                failure = str(error)
        if test is None:
            raise SearchError(
                f"none of the best candidates could be measured on the test split ({failure}) -> "
                "look at the server's log and begin a new ledger"
            )
        winner, base = candidates[name], await self._compare(self.base, "test")
        state = winner.state
        if state is not None:  # name and provenance are outside its digest
            settings, figures = self.settings, {"validation": confirmed[name], "test": test}
            figures["test_base_policy"] = base
            scores = {key: scores.model_dump(mode="json") for key, scores in figures.items()}
            provenance = state.provenance.model_copy(
                update={
                    "found_by": f"vllm-autoprune search, strategy {settings.strategy}, "
                    f"proposer {settings.proposer or 'none'}",
                    "evaluated_on": settings.evaluator,
                    "seed": settings.seed,
                    "scores": {"search_objective": winner.objective, **scores},
                    "notes": f"Candidate {name} by {winner.proposal.origin}. "
                    f"Objective: {describe_objective(settings)}.",
                }
            )
            title = f"{state.base_policy.name}-searched-k{settings.source_budget}"
            state = state.model_copy(update={"name": title, "provenance": provenance})
        return WinnerRecord(
            winner=name,
            digest=winner.require_candidate().digest,
            state=None if state is None else state.model_dump(mode="json"),
            program="" if winner.selection is None else winner.selection.code,
            confirmed=confirmed,
            estimates=estimates,
            test=test,
            base=base,
        )

    async def _compare(self, candidate: Candidate, split: Split) -> Comparison:
        """Scores of a candidate on a split, and paired differences to the base policy."""
        budgets, examples = self.settings.budgets, self.dataset.examples(split)
        full = await self._measure(None, 0, split)
        ours = [await self._measure(candidate, budget, split) for budget in budgets]
        theirs = [await self._measure(self.base, budget, split) for budget in budgets]
        values, base_values = (
            np.mean([relative_values(self.settings, examples, each, full) for each in answers], 0)
            for answers in (ours, theirs)
        )
        # Share of budgets at which each example is answered correctly, (M,).
        correct, base_correct = (
            np.mean([np.asarray(each.right, float) for each in answers], axis=0)
            for answers in (ours, theirs)
        )

        def mean(score: Callable[[Sequence[Example], Answers], float]) -> float:
            return round(sum(score(examples, answers) for answers in ours) / len(ours), 6)

        return Comparison(
            split=split,
            examples=len(examples),
            accuracy=mean(lambda _, answers: accuracy(answers)),
            accuracy_plus=mean(accuracy_plus),
            mme_total=mean(mme_total),
            objective=bootstrap_mean(examples, values),
            gain=bootstrap_mean(examples, values - base_values),
            accuracy_gain=bootstrap_mean(examples, correct - base_correct),
        )

    async def _measure(self, candidate: Candidate | None, budget: int, split: Split) -> Answers:
        count = len(self.dataset.examples(split))
        return await self.evaluator.evaluate(EvaluationJob(candidate, budget, split, 0, count))
