"""Scores of one case by benchmark, and as one figure: *Acc.* and *Rel.* by each definition in use.

MME is the sum over categories of accuracy and accuracy+ in per cent; accuracy+ is the share of
pairs with both answers right (Fu et al., MME, section 3). Acc. is the mean over benchmarks, MME
divided by a constant first (AutoPrune paper, supplement, "Evaluation Metrics"). Rel. is written
there as a ratio of means; most tables print a mean of ratios (CDPruner's definition). They differ
by up to four points, so a figure without its definition says little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_autoprune.evaluation.journal import MME, PAIRS, Answer, Question, Setup
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import ClusterBootstrap, Floats

_Mask = NDArray[np.bool_]

Scores = Mapping[str, float]
"""Scores by benchmark, in points for MME and in per cent for all others."""


class Aggregates(FrozenModel):
    """Mean score (*Acc.*), and its share of the full model's (*Rel.*) by two definitions.

    *Rel.* is the ratio of mean scores, or the mean of the benchmarks' ratios; it is None if it
    would divide by zero.
    """

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None

    @classmethod
    def of(
        cls, scores: Scores, full: Scores, mme_divisor: float, digits: int
    ) -> Aggregates:
        """Aggregates of ``scores`` and the ``full`` model's on the same benchmarks, rounded.

        MME's divisor cancels out in the mean of ratios.
        """
        divisors = {name: mme_divisor if name == MME else 1.0 for name in scores}
        acc, full_acc = (
            sum(part[name] / by for name, by in divisors.items()) / len(scores)
            for part in (scores, full)
        )
        ratios = [score / full[name] for name, score in scores.items() if full[name]]
        mean = (
            round(100 * sum(ratios) / len(ratios), digits)
            if len(ratios) == len(scores)
            else None
        )
        ratio = round(100 * acc / full_acc, digits) if full_acc else None
        return cls(acc=round(acc, digits), ratio_of_means=ratio, mean_of_ratios=mean)


@dataclass(frozen=True)
class Figures:
    """Figures of one case; an array ``(1 + draws,)`` has the value, followed by its resamples."""

    benchmarks: Mapping[str, Floats]
    """Scores by benchmark, in per cent or MME's points, if its answers are scored one by one."""
    topics: Mapping[str | None, Floats]
    """The figure that verdicts are based on, by topic of question; None stands for all questions.
    It is the mean score in per cent, or ``token_agreement`` if a score is agreement."""
    metrics: Mapping[str, Floats]
    """Figures by name, as far as the answers allow. If a score says that an answer is right:
    *Acc.* (``acc``), MME (``mme``), and mean score and accuracy+ of all scored questions in per
    cent (``accuracy``, ``accuracy_plus``). Mean log-probability of the reference answer
    (``logprob``). For the unpruned model's answer: how often it is given (``agreement``), the share
    of its tokens that greedy decoding gives after the tokens before them (``token_agreement``), the
    share before the first that differs (``same``), all in per cent; and ln p a token
    (``per_token``)."""


class _Column(NamedTuple):
    """Values of the questions ``(Q,)``, 0 if missing, and a mask of those that are present."""

    values: Floats
    present: _Mask

    @classmethod
    def of(cls, values: Sequence[float | None]) -> _Column:
        return cls(
            np.asarray([value or 0.0 for value in values]),
            np.asarray([value is not None for value in values]),
        )


class Scoring:
    """Scores the answers to a set of questions, with the same resamples for every case."""

    def __init__(self, questions: Sequence[Question], setup: Setup) -> None:
        self._questions = questions
        self._divisor = setup.mme_divisor
        self._has_labels = setup.score == "right"
        self._bootstrap = ClusterBootstrap([question.image for question in questions])
        pairs: dict[str, list[int]] = {}
        for index, question in enumerate(questions):
            if question.pair:
                pairs.setdefault(question.pair, []).append(index)
        self._pairs = [indices for indices in pairs.values() if len(indices) == 2]

    def figures(self, answers: Mapping[str, Answer]) -> Figures:
        """Figures of one case; ``answers`` has one answer to every question."""
        ordered = [answers[question.id] for question in self._questions]
        scores = _Column.of([answer.score for answer in ordered])
        matching = _Column.of([answer.by_token(answer.matching) for answer in ordered])
        same = _Column.of([answer.by_token(answer.same) for answer in ordered])
        pairs = self._pair_up(scores)
        benchmarks = self._score_benchmarks(scores, pairs)
        metrics = dict[str, Floats]()
        if MME in benchmarks:
            metrics["mme"] = benchmarks[MME]
        if self._has_labels:
            metrics |= self._measure_accuracy(benchmarks, scores, pairs)
        for name, unit, column in (
            ("logprob", 1, _Column.of([answer.logprob for answer in ordered])),
            ("per_token", 1, _Column.of([answer.per_token for answer in ordered])),
            ("agreement", 100, _Column.of([answer.agrees for answer in ordered])),
            ("token_agreement", 100, matching),
            ("same", 100, same),
        ):
            if column.present.any():
                metrics[name] = unit * self._mean(column, column.present)
        topics = self._score_topics(scores if self._has_labels else matching)
        return Figures(benchmarks, topics, metrics)

    def _mean(self, column: _Column, members: _Mask) -> Floats:
        """Mean ``(1 + draws,)`` over the ``members`` that have a value."""
        weights = (column.present & members).astype(np.float64)
        return self._bootstrap.mean(column.values, weights)

    def _pair_up(self, scores: _Column) -> _Column:
        """Column of pairs: whether both answers are right, at the index of the first question."""
        both = np.zeros(len(scores.values))
        paired = np.zeros(len(scores.values), dtype=bool)
        for question, other in self._pairs:
            both[question] = min(scores.values[question], scores.values[other]) == 1.0
            paired[question] = scores.present[question] and scores.present[other]
        return _Column(both, paired)

    def _score_benchmarks(self, scores: _Column, pairs: _Column) -> dict[str, Floats]:
        """Scores of benchmarks in which every answer has a score, in per cent or MME's points."""
        categories = self._split([question.category for question in self._questions])
        benchmarks = dict[str, Floats]()
        for name, members in self._split(
            [question.benchmark for question in self._questions]
        ):
            if not scores.present[members].all():
                continue
            if name not in (MME, PAIRS):
                benchmarks[name] = 100 * self._mean(scores, members)
                continue
            # MME sums accuracy and accuracy+ of every category.
            parts = [mask & members for _, mask in categories if (mask & members).any()]
            points = [
                100 * self._mean(scores, part) + 100 * self._mean(pairs, part)
                for part in parts
            ]
            benchmarks[name] = np.sum(points, axis=0)
            if name == PAIRS:
                benchmarks[name] = benchmarks[name] / (2 * len(parts))
        return benchmarks

    def _measure_accuracy(
        self, benchmarks: Mapping[str, Floats], scores: _Column, pairs: _Column
    ) -> dict[str, Floats]:
        """Figures of right answers: ``acc``, ``accuracy`` and ``accuracy_plus``, in per cent.

        *Acc.* is left out unless every benchmark has a score. The others are means over the scored
        questions and over the pairs of two scored questions, and are left out if there are none.
        """
        metrics = dict[str, Floats]()
        if benchmarks.keys() == {question.benchmark for question in self._questions}:
            scaled = [
                points / (self._divisor if name == MME else 1.0)
                for name, points in benchmarks.items()
            ]
            metrics["acc"] = np.mean(scaled, axis=0)
        if scores.present.any():
            metrics["accuracy"] = 100 * self._mean(scores, scores.present)
            if pairs.present.any():
                metrics["accuracy_plus"] = 100 * self._mean(pairs, scores.present)
        return metrics

    def _score_topics(self, deciding: _Column) -> dict[str | None, Floats]:
        """Per cent by topic if every answer in it has a value; None stands for all questions."""
        topics = self._split([question.topic for question in self._questions])
        everything = np.ones(len(self._questions), dtype=bool)
        return {
            name: 100 * self._mean(deciding, members)
            for name, members in [(None, everything), *topics]
            if deciding.present[members].all()
        }

    def _split(self, names: Sequence[str]) -> list[tuple[str, _Mask]]:
        """Distinct ``names`` in order of appearance, each with the mask of its questions."""
        return [(name, np.asarray(names) == name) for name in dict.fromkeys(names)]
