"""Choice of the winner on held-out splits, and its scores there.

The winner has the best lower bound of its paired gain over the base policy on search and validation
examples together: the search split alone overestimates candidates that were lucky on it, and the
validation split alone is a smaller sample. Among tied candidates, the simplest wins; with
several models, the one that gains most on the model where it gains least. The winner is reported on
the test split, beside the base policy on the same examples.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from offline_search.components import structure
from offline_search.dataset import Dataset, Split
from offline_search.differences import Difference, compare, fit_difficulty
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, History, Trial, rounded_mean
from offline_search.ledger import Comparison, ModelComparison, WinnerRecord
from offline_search.models import ModelScales, mask_models
from offline_search.settings import Settings
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import (
    ClusterBootstrap,
    Estimate,
    Floats,
    round_portably,
)
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState


@dataclass(frozen=True)
class _Finalist:
    """One of the best candidates, with its scores on the validation split.

    ``values`` ``(M + V,)`` has the values on the questions of the search split, NaN if one was not
    asked, followed by those of the validation split.
    """

    trial: Trial
    validation: Comparison
    values: Floats

    def complexity(self, budget: int) -> float:
        """Sort key of simplicity at K = ``budget``: the number of atoms, then q_e."""
        state = self.trial.require_state()
        quota, _ = state.constraints.selector.bounds(budget)
        return len(structure(state)) + quota / 1000


@dataclass(frozen=True)
class _Finals:
    """Finalists by name, and the base policy's values ``(M + V,)`` on the same questions.

    ``compare`` corrects values for the difficulty of questions, fitted on both splits together: the
    splits differ in difficulty, and candidates differ in how many questions of each they answered.
    ``models`` has the mask ``(M + V,)`` of each of several models.
    """

    finalists: Mapping[str, _Finalist]
    base: Floats
    compare: Callable[[Floats, Floats], Difference]
    models: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    @cached_property
    def gains(self) -> dict[str, Difference]:
        """Paired gains over the base policy."""
        return {
            name: self.compare(finalist.values, self.base)
            for name, finalist in self.finalists.items()
        }

    @cached_property
    def model_gains(self) -> dict[str, dict[str, float]]:
        """Paired gains over the base policy on each of several models; empty with one model."""
        if not self.models:
            return {}

        def gain(values: Floats, mask: NDArray[np.bool_]) -> float:
            asked = np.where(mask, values, np.nan)
            base = np.where(mask, self.base, np.nan)
            return round_portably(self.compare(asked, base).value, 6)

        return {
            name: {
                model: gain(finalist.values, mask)
                for model, mask in self.models.items()
            }
            for name, finalist in self.finalists.items()
        }

    def ranked(self, resolution: float, budget: int) -> list[str]:
        """Names by the one-standard-error rule (Breiman 1984).

        First are candidates that differ from the one with the best lower bound by at most a
        standard error and the resolution, in order of the smallest gain on any of several models,
        then of simplicity; then all others by lower bound.
        """
        gains = self.gains
        best = max(gains, key=lambda name: gains[name].low, default="")

        def rank(name: str) -> tuple[bool, float, float, float]:
            finalist = self.finalists[name]
            gap = self.compare(finalist.values, self.finalists[best].values)
            is_tied = name == best or abs(gap.value) <= min(resolution, gap.error)
            complexity = finalist.complexity(budget) if is_tied else 0.0
            smallest = 0.0
            if is_tied and self.models:
                smallest = min(self.model_gains[name].values())
            return not is_tied, -smallest, complexity, -gains[name].low

        return sorted(gains, key=rank)


@dataclass(frozen=True)
class HeldOutEvaluator:
    """Measures states on held-out splits as a whole, and chooses the winner of a search."""

    settings: Settings
    evaluator: RecordedEvaluator
    dataset: Dataset
    base: PruningState
    scales: ModelScales

    async def choose_winner(self, history: History) -> WinnerRecord:
        """Choose the winner of a search; raises :class:`SearchError` if none could be measured."""
        finals = await self._confirm(history)
        for name in finals.ranked(history.resolution, self.settings.source_budget):
            winner = finals.finalists[name].trial
            try:
                test = await self.compare(winner.require_state(), "test")
            except EvaluationFailed:
                continue
            base = await self.compare(self.base, "test")
            less_default = await self._compare_with_default(winner.require_state())
            scores: dict[str, JsonValue] = {
                "search_objective": history.estimate(winner),
                "validation": _dump(finals.finalists[name].validation),
                "test": _dump(test),
                "test_base_policy": _dump(base),
            }
            if less_default is not None:
                scores["test_less_default"] = _dump(less_default)
            losses = dict(self.scales.losses)
            if losses:
                scores["base_policy_losses"] = {**losses}
            state = self._describe_winner(finals.finalists[name], scores, test)
            return WinnerRecord(
                winner=name,
                digest=state.digest,
                state=state.model_dump(mode="json"),
                confirmed={
                    name: finalist.validation
                    for name, finalist in finals.finalists.items()
                },
                estimates={
                    name: _combined_estimate(finalist, history)
                    for name, finalist in finals.finalists.items()
                },
                searched={
                    trial.name: history.estimate(trial) or 0.0
                    for trial in (history.base, *history.evaluated())
                },
                gains={name: gap.estimate() for name, gap in finals.gains.items()},
                model_gains=finals.model_gains,
                losses=losses,
                test=test,
                base=base,
                less_default=less_default,
            )
        raise SearchError.of(
            "search",
            "none of the best candidates could be measured on the validation and test splits",
            "look at the server's log and begin a new ledger",
        )

    async def _confirm(self, history: History) -> _Finals:
        """Measure the best candidates of the search split on the validation split."""
        validation = self.dataset.splits["validation"]
        finalists: dict[str, _Finalist] = {}
        for trial in history.ranked()[: self.settings.confirmed]:
            with contextlib.suppress(EvaluationFailed):
                comparison = await self.compare(trial.require_state(), "validation")
                values = await self._append_validation(trial, history)
                finalists[trial.name] = _Finalist(trial, comparison, values)
        base = await self._append_validation(history.base, history)
        rows = [base, *(finalist.values for finalist in finalists.values())]
        unasked = np.full(len(validation), np.nan)
        for trial in history.evaluated():
            searched = history.values(trial)
            if trial.name not in finalists and searched is not None:
                rows.append(np.append(searched, unasked))
        examples = [*history.examples, *validation]
        difficulty = fit_difficulty(np.array(rows))
        compare_all = partial(compare, examples, difficulty=difficulty)
        return _Finals(finalists, base, compare_all, mask_models(examples))

    async def _append_validation(self, trial: Trial, history: History) -> Floats:
        """Values ``(M + V,)`` of a trial on the search and validation splits."""
        values, _ = await self._measure(trial.require_state(), "validation")
        searched = history.values(trial)
        assert searched is not None, "a trial that was evaluated has values"
        return np.append(searched, values)

    async def _compare_with_default(self, winner: PruningState) -> Comparison | None:
        """The winner on the test split, with paired differences from the default state.

        None if there is no default state, if it is the base policy, or if it cannot be measured.
        """
        name = self.settings.default_state
        if name in ("", self.settings.base_policy):
            return None
        with contextlib.suppress(EvaluationFailed):
            return await self.compare(winner, "test", load_state(name))
        return None

    def _describe_winner(
        self, finalist: _Finalist, scores: dict[str, JsonValue], test: Comparison
    ) -> PruningState:
        """The winner's state with a name and provenance, which do not change its digest."""
        settings = self.settings
        trial = finalist.trial
        state = trial.require_state()
        provenance = state.provenance.model_copy(
            update={
                "found_by": f"vllm-autoprune search, strategy {settings.strategy}, "
                f"proposer {settings.proposer or 'none'}",
                "evaluated_on": settings.evaluator,
                "seed": settings.seed,
                "scores": scores,
                "notes": f"Candidate {trial.name} by {trial.proposal.origin}. "
                f"Objective: {settings.objective_text}. Against {settings.base_policy} alone: "
                f"{_describe_gain(finalist.validation)} on validation, "
                f"{_describe_gain(test)} on test.{_describe_models(state, test)}",
            }
        )
        budget = re.sub(r"\W+", "-", str(settings.budgets[0]))
        name = f"{state.base_policy.name}-searched-k{budget}"
        return state.model_copy(update={"name": name, "provenance": provenance})

    async def compare(
        self,
        candidate: PruningState,
        split: Split,
        reference: PruningState | None = None,
    ) -> Comparison:
        """Scores of a candidate on a split, and paired differences from ``reference``.

        The reference is the base policy by default.
        """
        examples = self.dataset.splits[split]
        values, answers = await self._measure(candidate, split)
        reference_values, reference_answers = await self._measure(
            reference or self.base, split
        )
        total = 1000 / max(len(self.settings.models), 1)  # a mean over models
        accuracy_gains = _correct_shares(answers) - _correct_shares(reference_answers)
        return Comparison(
            split=split,
            examples=len(examples),
            accuracy=rounded_mean([row.accuracy for row in answers]),
            mme_total=rounded_mean(
                [total * float(row.mme_shares(examples).mean()) for row in answers]
            ),
            objective=_bootstrap_mean(examples, values),
            gain=_bootstrap_mean(examples, values - reference_values),
            accuracy_gain=_bootstrap_mean(examples, accuracy_gains),
            models={
                name: ModelComparison(
                    accuracy=rounded_mean(_correct_shares(answers)[mask].tolist()),
                    gain=_bootstrap_mean(examples, values - reference_values, mask),
                    accuracy_gain=_bootstrap_mean(examples, accuracy_gains, mask),
                )
                for name, mask in mask_models(examples).items()
            },
        )

    async def _measure(
        self, candidate: PruningState, split: Split
    ) -> tuple[Floats, Sequence[Answers]]:
        """Values of a candidate on a split ``(M,)``, and its answers at each budget."""
        examples = self.dataset.splits[split]

        async def ask(state: PruningState | None, budget: int | str) -> Answers:
            job = EvaluationJob(state, budget, split, 0, len(examples))
            return await self.evaluator.evaluate(job)

        full = await ask(None, 0)
        answers = [await ask(candidate, budget) for budget in self.settings.budgets]
        objective = self.settings.objective
        values = [row.relative_to(full, examples, objective) for row in answers]
        return self.scales.apply(examples, np.mean(values, 0)), answers


def _combined_estimate(finalist: _Finalist, history: History) -> float:
    """A finalist's objective on the search and validation splits together.

    It is the mean of the estimate on the one and the value on the other, weighted by their numbers
    of examples.
    """
    search_examples = len(history.examples)
    validation = finalist.validation
    total = search_examples * (history.estimate(finalist.trial) or 0.0)
    total += validation.examples * validation.objective.value
    return round_portably(total / (search_examples + validation.examples), 6)


def _correct_shares(answers: Sequence[Answers]) -> Floats:
    """Share of budgets at which each example is answered correctly, ``(M,)``."""
    shares: Floats = np.mean([row.right for row in answers], axis=0)
    return shares


def _bootstrap_mean(
    examples: Sequence[Example],
    values: Floats,
    mask: NDArray[np.bool_] | slice = slice(None),
) -> Estimate:
    """Mean with its 95 % bootstrap interval, clustered by image, rounded to six decimals.

    ``mask`` ``(M,)``: examples and values that count; by default all.
    """
    images = np.array([example.image for example in examples])[mask]
    bootstrap = ClusterBootstrap(images.tolist())
    return Estimate.of(bootstrap.mean(values[mask])).rounded(6)


def _dump(comparison: Comparison) -> JsonValue:
    record: JsonValue = comparison.model_dump(mode="json")
    return record


def _describe_models(state: PruningState, test: Comparison) -> str:
    """Gains on each of several models, and what of a state is not each model's own choice."""
    if not test.models:
        return ""
    gains = [
        f"{_describe_gain(comparison)} on {name}"
        for name, comparison in test.models.items()
    ]
    text = f" On test by model: {', '.join(gains)}."
    for call in state.scoring.signals:
        sign = call.model_dump().get("sign", "auto")
        if sign != "auto":
            text += f' {call.atom} has the sign "{sign}" on every model.'
    return text


def _describe_gain(comparison: Comparison | ModelComparison) -> str:
    """Whether a candidate is ahead of the base policy or behind it, and by how much."""
    gain = comparison.gain
    if gain.value < 0:
        return f"behind by {-gain.value:.3f} ({-gain.high:.3f} to {-gain.low:.3f})"
    return f"ahead by {gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f})"
