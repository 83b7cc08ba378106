"""Scores of one case by benchmark, and as one figure: *Acc.* and *Rel.* by each definition in use.

MME is the sum over categories of accuracy and accuracy+ in per cent; accuracy+ is the share of
pairs with both answers right (Fu et al., MME, section 3). Acc. is the mean over benchmarks, MME
divided by a constant first (AutoPrune paper, supplement, "Evaluation Metrics"). Rel. is written
there as a ratio of means; most tables print a mean of ratios (CDPruner's definition). They differ
by up to four points, so a figure without its definition says little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_autoprune.evaluation.journal import MME, Answer, Question, kind_of
from vllm_autoprune.statistics import ClusterBootstrap, Floats

Scores = Mapping[str, float]
"""Scores by benchmark, each in its official unit: points for MME, per cent for all others."""

MMBENCH = ("MMB-EN", "MMB-CN")


def normalise(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> Scores:
    """Scores with MME divided by ``mme_divisor``, which turns its points into per cent.

    Leaves out the benchmarks in ``without``; raises ValueError if none is left.
    """
    used = {
        name: score / mme_divisor if name == MME else score
        for name, score in scores.items()
        if name not in without
    }
    if not used:
        raise ValueError("no benchmark is left to average")
    return used


def accuracy(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> float:
    """Acc.: the mean over benchmarks, MME normalised."""
    used = normalise(scores, mme_divisor, without)
    return sum(used.values()) / len(used)


def ratio_of_means(
    scores: Scores, full: Scores, mme_divisor: float, without: Collection[str] = ()
) -> float:
    """Rel. as the paper writes it: 100 x Acc. of the pruned over Acc. of the full model."""
    _check_same_benchmarks(scores, full)
    return 100 * accuracy(scores, mme_divisor, without) / accuracy(full, mme_divisor, without)


def mean_of_ratios(scores: Scores, full: Scores, without: Collection[str] = ()) -> float:
    """Rel. as CDPruner defines it: 100 x the mean over benchmarks of pruned over full.

    The divisor of MME cancels out.
    """
    _check_same_benchmarks(scores, full)
    used = normalise(scores, 1.0, without)
    return 100 * sum(score / full[name] for name, score in used.items()) / len(used)


def _check_same_benchmarks(scores: Scores, full: Scores) -> None:
    """Raise ValueError unless both were scored on the same benchmarks."""
    different = sorted(scores.keys() ^ full.keys())
    if different:
        raise ValueError(f"not scored on the same benchmarks: {', '.join(different)}")


@dataclass(frozen=True)
class Figures:
    """Figures of one case; each is the value and then its resamples, ``(1 + draws,)``."""

    benchmarks: Mapping[str, Floats]
    """In per cent, MME in points; benchmarks without scores of single answers are left out."""
    acc: Floats | None
    """*Acc.* by :func:`aggregate.accuracy`; None if a benchmark is left out."""
    accuracy: Floats | None
    """Mean score over all questions that have one, in per cent."""
    accuracy_plus: Floats | None
    logprob: Floats | None
    """Mean log-probability of the reference answer."""
    kinds: Mapping[str | None, Floats]
    """``accuracy`` by kind of question, under None of all of them."""


class Scoring:
    """Scoring of the answers to one set of questions, with the same resamples for every case."""

    def __init__(self, questions: Sequence[Question], mme_divisor: float) -> None:
        self._questions = questions
        self._divisor = mme_divisor
        self._bootstrap = ClusterBootstrap([question.image for question in questions])
        self._benchmark = np.asarray([question.benchmark for question in questions])
        self._kind = np.asarray([kind_of(question) for question in questions])
        self._category = np.asarray([question.category for question in questions])
        pairs: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            if question.pair:
                pairs.setdefault(question.pair, []).append(place)
        self._pairs = [places for places in pairs.values() if len(places) == 2]

    def figures(self, answers: Mapping[str, Answer]) -> Figures:
        """Figures of one case; ``answers`` has one answer to every question."""
        ordered = [answers[question.id] for question in self._questions]
        scores, has_score = _column([answer.score for answer in ordered])
        logprobs, has_logprob = _column([answer.logprob for answer in ordered])
        benchmarks = {}
        for name in dict.fromkeys(question.benchmark for question in self._questions):
            members = self._benchmark == name
            if has_score[members].all():
                points = self._mme(scores, members) if name == MME else self._mean(scores, members)
                benchmarks[name] = 100 * points
        complete = len(benchmarks) == len(set(self._benchmark))
        return Figures(
            benchmarks=benchmarks,
            acc=_acc(benchmarks, self._divisor) if complete and benchmarks else None,
            accuracy=100 * self._mean(scores, has_score) if has_score.any() else None,
            accuracy_plus=100 * self._plus(scores, has_score) if self._pairs else None,
            logprob=self._mean(logprobs, has_logprob) if has_logprob.all() else None,
            kinds=dict(self._kinds(scores, has_score)),
        )

    def _kinds(self, scores: Floats, has_score: Floats) -> Iterator[tuple[str | None, Floats]]:
        """Mean score of all questions and of each kind, where every one of them has a score."""
        every = np.ones(len(scores), dtype=bool)
        parts = {None: every} | {kind: self._kind == kind for kind in dict.fromkeys(self._kind)}
        for kind, members in parts.items():
            if has_score[members].all():
                yield kind, 100 * self._mean(scores, members)

    def _mme(self, scores: Floats, members: Floats) -> Floats:
        """Sum over categories of accuracy and accuracy+, at most 2 for each category."""
        total: Floats = np.zeros(1)
        for category in dict.fromkeys(self._category[members]):
            part = members & (self._category == category)
            total = total + self._mean(scores, part) + self._plus(scores, part)
        return total

    def _plus(self, scores: Floats, part: Floats) -> Floats:
        """Share of the pairs within ``part`` with both answers right."""
        both, weight = np.zeros(len(scores)), np.zeros(len(scores))
        for first, second in self._pairs:
            if part[first] and part[second]:
                both[first], weight[first] = float(min(scores[first], scores[second]) == 1.0), 1.0
        return self._bootstrap.mean(both, weight)

    def _mean(self, values: Floats, part: Floats) -> Floats:
        return self._bootstrap.mean(values, part.astype(np.float64))


def _column(values: Sequence[float | None]) -> tuple[Floats, Floats]:
    """Values with 0 in place of None, and a mask of those that are not None."""
    present = np.asarray([value is not None for value in values])
    return np.asarray([value or 0.0 for value in values], dtype=np.float64), present


def _acc(benchmarks: Mapping[str, Floats], divisor: float) -> Floats:
    parts = [f / divisor if name == MME else f for name, f in benchmarks.items()]
    mean: Floats = np.mean(parts, axis=0)
    return mean
