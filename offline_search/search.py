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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from offline_search.candidates import base_state
from offline_search.components import Candidate
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob, Evaluator, RecordedEvaluator
from offline_search.history import (
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
    Ledger,
    SettingsRecord,
    SummaryRecord,
    WinnerRecord,
)
from offline_search.proposer import ProposalClient, Proposer, SpendingLimits
from offline_search.report import ProgressLog
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
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.state import PruningState


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
        _require_same_settings(ledger, settings)
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
        fixed_evaluations = has_fixed_evaluations(settings, strategy)
        summary = summarize(history)
        for number in range(1, maximum_rounds(settings, strategy) + 1):
            if fixed_evaluations and _count_answers(history) >= budget:
                break
            rng = Random(f"{settings.seed} {number}")
            count = settings.per_round
            if races(settings, strategy):
                # The last round is smaller, so that a race exceeds its budget by little.
                unspent = budget - _count_answers(history)
                full = len(examples) * len(settings.budgets)
                count = RACED_PER_PLACE * min(count, max(1, unspent // full))
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


def _require_same_settings(ledger: Ledger, settings: Settings) -> None:
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


class NothingMeasured(SearchError):
    """No candidate of a search was measured on the whole search split."""


class _WinnerSelector:
    """Measures the best candidates on the validation and test splits."""

    def __init__(
        self, settings: Settings, evaluator: RecordedEvaluator, dataset: Dataset, base: PruningState
    ) -> None:
        self._settings = settings
        self._evaluator = evaluator
        self._dataset = dataset
        self._base = base

    async def evaluate_baselines(self) -> None:
        """Measure the unpruned model and the base policy on both splits.

        Before the search, because a question that cannot be asked would otherwise be found at its
        end. Raises :class:`BaselineFailed`.
        """
        splits: tuple[Split, ...] = ("validation", "test")
        for split in splits:
            await self._compare(self._base, split)

    async def select(self, history: History) -> WinnerRecord:
        """The winner; raises :class:`SearchError` if no candidate was measured to the end."""
        candidates = {trial.name: trial for trial in history.ranked()[: self._settings.confirmed]}
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
        searched, estimates = len(self._dataset.examples("search")), {}
        for name, validation in confirmed.items():
            total = searched * candidates[name].score
            total += validation.examples * validation.objective.value
            estimates[name] = round(total / (searched + validation.examples), 6)
        name, test = await self._measure_best(candidates, estimates)
        winner = candidates[name]
        base = await self._compare(self._base, "test")
        state = None
        if winner.state is not None:
            document = self._document(winner, winner.state, confirmed[name], test, base)
            state = document.model_dump(mode="json")
        return WinnerRecord(
            winner=name,
            digest=winner.require_candidate().digest,
            state=state,
            program="" if winner.selection is None else winner.selection.code,
            confirmed=confirmed,
            estimates=estimates,
            test=test,
            base=base,
        )

    async def _measure_best(
        self, candidates: Mapping[str, Trial], estimates: Mapping[str, float]
    ) -> tuple[str, Comparison]:
        """The best candidate that can be measured on the test split, and its scores there.

        Raises :class:`SearchError` if there is none.
        """
        failure = ""
        for name in sorted(estimates, key=lambda candidate: -estimates[candidate]):
            try:
                return name, await self._compare(candidates[name].require_candidate(), "test")
            except EvaluationFailed as error:
                failure = str(error)
        raise SearchError(
            f"none of the best candidates could be measured on the test split ({failure}) -> "
            "look at the server's log and begin a new ledger"
        )

    async def _compare(self, candidate: Candidate, split: Split) -> Comparison:
        """Scores of a candidate on a split, and paired differences to the base policy."""
        budgets, examples = self._settings.budgets, self._dataset.examples(split)
        full = await self._measure(None, 0, split)
        ours = [await self._measure(candidate, budget, split) for budget in budgets]
        theirs = [await self._measure(self._base, budget, split) for budget in budgets]
        values, base_values = (
            np.mean([relative_values(self._settings, examples, each, full) for each in answers], 0)
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
            accuracy_gain=bootstrap_mean(examples, _mean_correct(ours) - _mean_correct(theirs)),
        )

    async def _measure(self, candidate: Candidate | None, budget: int, split: Split) -> Answers:
        count = len(self._dataset.examples(split))
        return await self._evaluator.evaluate(EvaluationJob(candidate, budget, split, 0, count))

    def _document(
        self,
        winner: Trial,
        state: PruningState,
        validation: Comparison,
        test: Comparison,
        base: Comparison,
    ) -> PruningState:
        """The winning state with its name and provenance, which are outside its digest."""
        settings = self._settings
        provenance = state.provenance.model_copy(
            update={
                "found_by": f"vllm-autoprune search, strategy {settings.strategy}, "
                f"proposer {settings.proposer or 'none'}",
                "evaluated_on": settings.evaluator,
                "seed": settings.seed,
                "scores": {
                    "search_objective": winner.objective,
                    "validation": validation.model_dump(mode="json"),
                    "test": test.model_dump(mode="json"),
                    "test_base_policy": base.model_dump(mode="json"),
                },
                "notes": f"Candidate {winner.name} by {winner.proposal.origin}. "
                f"Objective: {describe_objective(settings)}.",
            }
        )
        name = f"{state.base_policy.name}-searched-k{settings.source_budget}"
        return state.model_copy(update={"name": name, "provenance": provenance})


def _mean_correct(answers: Sequence[Answers]) -> Floats:
    """Share of budgets at which each example is answered correctly, ``(M,)``."""
    mean: Floats = np.mean([np.asarray(each.right, float) for each in answers], axis=0)
    return mean
