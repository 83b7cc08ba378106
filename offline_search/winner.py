"""Selection of the winner: the best candidates are measured again on held-out examples.

The winner is the best candidate by search and validation examples together: the search split alone
overestimates candidates that were lucky on it, and the validation split alone is a smaller sample.
The winner is reported on the test split, beside the base policy on the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from offline_search.components import Candidate
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import (
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    bootstrap_mean,
    describe_objective,
    mme_total,
    relative_values,
)
from offline_search.ledger import Comparison, WinnerRecord
from offline_search.settings import Settings
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.state import PruningState


class NothingMeasured(SearchError):
    """No candidate of a search was measured on the whole search split."""


class WinnerSelector:
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
        confirmed = await self._confirm(candidates.values())
        if not confirmed:
            raise SearchError(
                "none of the best candidates could be measured on the validation split -> "
                "look at the server's log and begin a new ledger"
            )
        estimates = {
            name: self._estimate_objective(candidates[name], validation)
            for name, validation in confirmed.items()
        }
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

    async def _confirm(self, candidates: Iterable[Trial]) -> dict[str, Comparison]:
        """Scores on the validation split, without candidates whose evaluation failed."""
        confirmed: dict[str, Comparison] = {}
        for trial in candidates:
            try:
                confirmed[trial.name] = await self._compare(trial.require_candidate(), "validation")
            except EvaluationFailed:
                continue
        return confirmed

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

    def _estimate_objective(self, trial: Trial, validation: Comparison) -> float:
        """Objective over search and validation examples together.

        No shrinkage towards the mean: all candidates have the same examples, so it would not
        change their order.
        """
        search_count = len(self._dataset.examples("search"))
        total = search_count * trial.score + validation.examples * validation.objective.value
        return round(total / (search_count + validation.examples), 6)

    async def _compare(self, candidate: Candidate, split: Split) -> Comparison:
        """Scores of a candidate on a split, and paired differences to the base policy."""
        budgets, examples = self._settings.budgets, self._dataset.examples(split)
        full = await self._measure(None, 0, split)
        ours = [await self._measure(candidate, budget, split) for budget in budgets]
        theirs = [await self._measure(self._base, budget, split) for budget in budgets]
        values, base_values = (
            np.mean([relative_values(self._settings, examples, one, full) for one in answers], 0)
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
