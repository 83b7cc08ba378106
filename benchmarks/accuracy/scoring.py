"""Answers as figures: each benchmark in its own unit, MME as MME counts, *Acc.* of all of them.

Knows nothing about other cases. MME: of each category accuracy and accuracy+ in per cent, summed;
accuracy+ is the share of pairs with both answers right (Fu et al., MME, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.records import MME, Answer, Question
from benchmarks.accuracy.resampling import Floats, Resampling


@dataclass(frozen=True)
class Figures:
    """One case: figures with their resamplings, each ``(1 + DRAWS,)``."""

    benchmarks: Mapping[str, Floats]
    """Per cent, but points for MME; a benchmark whose answers have no scores is left out."""
    acc: Floats | None
    """Acc. as :func:`aggregate.accuracy` has it; None where a benchmark is left out."""
    accuracy: Floats | None
    """Mean score over all questions that have one, per cent."""
    accuracy_plus: Floats | None
    logprob: Floats | None
    """Mean log-probability of the reference answer."""


class Scoring:
    """Scores answers to the same questions, resampled alike."""

    def __init__(self, questions: Sequence[Question], mme_divisor: float) -> None:
        self._questions = questions
        self._divisor = mme_divisor
        self._resampling = Resampling([question.image for question in questions])
        self._benchmark = np.asarray([question.benchmark for question in questions])
        self._category = np.asarray([question.category for question in questions])
        pairs: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            if question.pair:
                pairs.setdefault(question.pair, []).append(place)
        self._pairs = [places for places in pairs.values() if len(places) == 2]

    def figures(self, answers: Mapping[str, Answer]) -> Figures:
        """Figures of one case; ``answers`` by question, one for each."""
        given = [answers[question.id] for question in self._questions]
        scores, scored = _column([answer.score for answer in given])
        logprobs, told = _column([answer.logprob for answer in given])
        found = {}
        for name in dict.fromkeys(question.benchmark for question in self._questions):
            here = self._benchmark == name
            if scored[here].all():
                points = self._mme(scores, here) if name == MME else self._mean(scores, here)
                found[name] = 100 * points
        whole = len(found) == len(set(self._benchmark))
        return Figures(
            benchmarks=found,
            acc=_acc(found, self._divisor) if whole and found else None,
            accuracy=100 * self._mean(scores, scored) if scored.any() else None,
            accuracy_plus=100 * self._plus(scores, scored) if self._pairs else None,
            logprob=self._mean(logprobs, told) if told.all() else None,
        )

    def _mme(self, scores: Floats, here: Floats) -> Floats:
        """Over categories, accuracy and accuracy+ summed; of one category at most 2."""
        total: Floats = np.zeros(1)
        for category in dict.fromkeys(self._category[here]):
            part = here & (self._category == category)
            total = total + self._mean(scores, part) + self._plus(scores, part)
        return total

    def _plus(self, scores: Floats, part: Floats) -> Floats:
        """Share of pairs within ``part`` with both right."""
        both, weight = np.zeros(len(scores)), np.zeros(len(scores))
        for first, second in self._pairs:
            if part[first] and part[second]:
                both[first], weight[first] = float(min(scores[first], scores[second]) == 1.0), 1.0
        return self._resampling.mean(both, weight)

    def _mean(self, values: Floats, part: Floats) -> Floats:
        return self._resampling.mean(values, part.astype(np.float64))


def _column(values: Sequence[float | None]) -> tuple[Floats, Floats]:
    """Values with 0 where there is none, and where there is one."""
    there = np.asarray([value is not None for value in values])
    return np.asarray([value or 0.0 for value in values], dtype=np.float64), there


def _acc(benchmarks: Mapping[str, Floats], divisor: float) -> Floats:
    parts = [f / divisor if name == MME else f for name, f in benchmarks.items()]
    mean: Floats = np.mean(parts, axis=0)
    return mean
