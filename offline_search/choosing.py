"""The final argmax, made honest: the best are measured again where they were not chosen.

Knows nothing about how candidates came about. The winner is the best of the confirmed by search and
validation examples together: the search split alone flatters whoever was lucky on it, and the
validation split alone throws away most of what is known. Its figures are those of the test split,
beside its base policy's, paired.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offline_search.answers import (
    Answers,
    Floats,
    accuracy,
    accuracy_plus,
    interval,
    mme_total,
    relative,
)
from offline_search.evaluators.protocol import EvaluationFailed, Job
from offline_search.examples import Dataset
from offline_search.history import History, Trial
from offline_search.measuring import Measuring
from offline_search.objectives import axes
from offline_search.records import Chosen, Comparison, Member, Split, Tried
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.states.state import PruningState

FRONT = 12
"""Members of a Pareto front that are measured on the test split, the best objective first."""


class Choosing:
    """Measures states on the splits that the search has not seen."""

    def __init__(self, settings: Settings, measuring: Measuring, dataset: Dataset) -> None:
        self._settings = settings
        self._measuring = measuring
        self._dataset = dataset

    async def choose(self, history: History, base: PruningState) -> Chosen:
        """Raises :class:`SearchError` where nothing was evaluated to the end."""
        candidates = history.ranked()[: self._settings.confirmed]
        if not candidates:
            raise SearchError(
                "no candidate was evaluated to the end -> `vllm-autoprune search report` has the "
                "reasons; fix them and begin a new ledger"
            )
        confirmed: dict[str, Comparison] = {}
        for trial in candidates:
            assert trial.state is not None
            try:
                confirmed[trial.name] = await self._compare(trial.state, base, "validation")
            except EvaluationFailed:
                continue
        if not confirmed:
            raise SearchError(
                "none of the best candidates could be measured on the validation split -> "
                "look at the server's log and begin a new ledger"
            )
        estimates = {
            trial.name: self._estimate(trial, confirmed[trial.name])
            for trial in candidates
            if trial.name in confirmed
        }
        name = max(estimates, key=lambda known: estimates[known])
        winner = next(trial for trial in candidates if trial.name == name)
        assert winner.state is not None
        test = await self._compare(winner.state, base, "test")
        alone = await self._compare(base, base, "test")
        state = self._named(winner, confirmed[name], test, alone)
        return Chosen(
            winner=name,
            digest=state.digest,
            state=state.model_dump(mode="json"),
            confirmed=confirmed,
            estimates=estimates,
            test=test,
            base=alone,
            front=await self._front(history, base),
        )

    async def _front(self, history: History, base: PruningState) -> dict[str, Member]:
        """The Pareto front and the base policy, where nobody chose; empty for one objective."""
        if not self._settings.several:
            return {}
        shown = [("base", base, history.base)]
        for trial in history.front()[:FRONT]:
            assert trial.state is not None
            shown.append((trial.name, trial.state, trial.tried))
        found: dict[str, Member] = {}
        for name, state, tried in shown:
            try:
                test = await self._point(state, tried)
            except EvaluationFailed:
                continue
            found[name] = Member(digest=state.digest, search=tried.axes, test=test)
        return found

    async def _point(self, state: PruningState, tried: Tried) -> dict[str, float]:
        examples = self._dataset.of("test")
        full = await self._measuring.answers(Job(None, 0, "test", 0, len(examples)))
        values = {
            budget: relative(await self._answers(state, budget, "test"), full)
            for budget in self._settings.budgets
        }
        objective = round(float(self._across(list(values.values())).mean()), 6)
        slow = -tried.axes["latency"] if "latency" in tried.axes else None
        return axes(self._settings, examples, values, objective, slow)

    def _estimate(self, trial: Trial, validation: Comparison) -> float:
        """The objective over search and validation examples together.

        All candidates have the same examples, so shrinking each towards their mean would leave
        their order as it is.
        """
        searched = len(self._dataset.of("search"))
        total = searched * (trial.objective or 0.0)
        total += validation.examples * validation.objective.value
        return round(total / (searched + validation.examples), 6)

    async def _compare(self, state: PruningState, base: PruningState, split: Split) -> Comparison:
        examples = self._dataset.of(split)
        count = len(examples)
        full = await self._measuring.answers(Job(None, 0, split, 0, count))
        ours = [await self._answers(state, budget, split) for budget in self._settings.budgets]
        theirs = [await self._answers(base, budget, split) for budget in self._settings.budgets]
        values = self._across([relative(answers, full) for answers in ours])
        rival = self._across([relative(answers, full) for answers in theirs])
        right = np.mean([np.asarray(answers.right, float) for answers in ours], axis=0)
        beside = np.mean([np.asarray(answers.right, float) for answers in theirs], axis=0)
        return Comparison(
            split=split,
            examples=count,
            accuracy=_mean([accuracy(answers) for answers in ours]),
            accuracy_plus=_mean([accuracy_plus(examples, answers) for answers in ours]),
            mme_total=_mean([mme_total(examples, answers) for answers in ours]),
            objective=interval(examples, values),
            gain=interval(examples, values - rival),
            accuracy_gain=interval(examples, right - beside),
        )

    def _across(self, values: Sequence[Floats]) -> Floats:
        """One row for several budgets: their mean, or the row of the worst budget."""
        if self._settings.across == "worst":
            return min(values, key=lambda each: float(each.mean()))
        mean: Floats = np.mean(values, axis=0)
        return mean

    async def _answers(self, state: PruningState, budget: int, split: Split) -> Answers:
        count = len(self._dataset.of(split))
        return await self._measuring.answers(Job(state, budget, split, 0, count))

    def _named(
        self, winner: Trial, validation: Comparison, test: Comparison, base: Comparison
    ) -> PruningState:
        """The winner with its evidence; its digest stays, for provenance is outside it."""
        assert winner.state is not None
        settings = self._settings
        provenance = winner.state.provenance.model_copy(
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
                "notes": f"Candidate {winner.name} by {winner.proposed.origin}. Objective: mean "
                "log-probability of the reference answer less the full-token model's, in nats.",
            }
        )
        name = f"{settings.base_policy}-searched-k{settings.source_budget}"
        return winner.state.model_copy(update={"name": name, "provenance": provenance})


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 6)
