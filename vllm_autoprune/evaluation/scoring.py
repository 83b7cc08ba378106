"""Scores of one case by benchmark, and as one figure: *Acc.* and *Rel.* by each definition in use.

MME is the sum over categories of accuracy and accuracy+ in per cent; accuracy+ is the share of
pairs with both answers right (Fu et al., MME, section 3). Acc. is the mean over benchmarks, MME
divided by a constant first (AutoPrune paper, supplement, "Evaluation Metrics"). Rel. is written
there as a ratio of means; most tables print a mean of ratios (CDPruner's definition). They differ
by up to four points, so a figure without its definition says little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_autoprune.evaluation.journal import MME, Answer, Question
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import ClusterBootstrap, Floats

Scores = Mapping[str, float]
"""Scores by benchmark, each in its official unit: points for MME, per cent for all others."""

MMBENCH = ("MMB-EN", "MMB-CN")


class Aggregates(FrozenModel):
    """*Acc.*, and *Rel.* by both definitions; None in place of a division by zero."""

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None

    def rounded(self, digits: int) -> Aggregates:
        """The same figures with fewer decimals."""
        figures = {name: None if f is None else round(f, digits) for name, f in self}
        return Aggregates.model_validate(figures)


def aggregate(
    scores: Scores, full: Scores, mme_divisor: float, without: Collection[str] = ()
) -> Aggregates:
    """Figures of scores beside those of the full model, but for the benchmarks in ``without``.

    Acc. is the mean over benchmarks, MME divided by ``mme_divisor``. Rel. as the paper writes it is
    100 x Acc. over Acc. of the full model; as CDPruner defines it, 100 x the mean over benchmarks
    of a score over the full model's, where the divisor of MME cancels out. Raises ValueError for
    scores on other benchmarks than the full model's, and where none is left.
    """
    if different := sorted(scores.keys() ^ full.keys()):
        raise ValueError(f"not scored on the same benchmarks: {', '.join(different)}")
    names = [name for name in scores if name not in without]
    if not names:
        raise ValueError("no benchmark is left to average")
    divisors = {name: mme_divisor if name == MME else 1.0 for name in names}
    acc, full_acc = (
        sum(part[name] / divisors[name] for name in names) / len(names) for part in (scores, full)
    )
    ratios = [scores[name] / full[name] for name in names if full[name]]
    return Aggregates(
        acc=acc,
        ratio_of_means=100 * acc / full_acc if full_acc else None,
        mean_of_ratios=100 * (sum(ratios) / len(ratios)) if len(ratios) == len(names) else None,
    )


@dataclass(frozen=True)
class Figures:
    """Figures of one case; each is the value and then its resamples, ``(1 + draws,)``."""

    benchmarks: Mapping[str, Floats]
    """In per cent, MME in points; benchmarks without scores of single answers are left out."""
    acc: Floats | None
    """*Acc.*; None if a benchmark is left out."""
    accuracy: Floats | None
    """Mean score over all questions that have one, in per cent."""
    accuracy_plus: Floats | None
    logprob: Floats | None
    """Mean log-probability of the reference answer."""
    topics: Mapping[str | None, Floats]
    """``accuracy`` by topic of question, under None of all of them."""


class Scoring:
    """Scoring of the answers to one set of questions, with the same resamples for every case."""

    def __init__(self, questions: Sequence[Question], mme_divisor: float) -> None:
        self._questions = questions
        self._divisor = mme_divisor
        self._bootstrap = ClusterBootstrap([question.image for question in questions])
        self._benchmark = np.asarray([question.benchmark for question in questions])
        self._topic = np.asarray([question.topic for question in questions])
        self._category = np.asarray([question.category for question in questions])
        pairs: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            if question.pair:
                pairs.setdefault(question.pair, []).append(place)
        self._pairs = [places for places in pairs.values() if len(places) == 2]

    def figures(self, answers: Mapping[str, Answer]) -> Figures:
        """Figures of one case; ``answers`` has one answer to every question."""
        ordered = [answers[question.id] for question in self._questions]
        # Values with 0 in place of None, and masks of those that are not None.
        has_score, has_logprob = (
            np.asarray([value is not None for value in values])
            for values in ([a.score for a in ordered], [a.logprob for a in ordered])
        )
        scores = np.asarray([answer.score or 0.0 for answer in ordered])
        logprobs = np.asarray([answer.logprob or 0.0 for answer in ordered])
        benchmarks = {}
        for name in dict.fromkeys(question.benchmark for question in self._questions):
            members = self._benchmark == name
            if has_score[members].all():
                points = self._mme(scores, members) if name == MME else self._mean(scores, members)
                benchmarks[name] = 100 * points
        acc: Floats | None = None
        if benchmarks and len(benchmarks) == len(set(self._benchmark)):
            divisors = [self._divisor if name == MME else 1.0 for name in benchmarks]
            acc = np.mean(
                [figure / by for figure, by in zip(benchmarks.values(), divisors, strict=True)],
                axis=0,
            )
        parts = {None: np.ones(len(scores), dtype=bool)}
        parts |= {topic: self._topic == topic for topic in dict.fromkeys(self._topic)}
        return Figures(
            benchmarks=benchmarks,
            acc=acc,
            accuracy=100 * self._mean(scores, has_score) if has_score.any() else None,
            accuracy_plus=100 * self._plus(scores, has_score) if self._pairs else None,
            logprob=self._mean(logprobs, has_logprob) if has_logprob.all() else None,
            topics={
                topic: 100 * self._mean(scores, members)
                for topic, members in parts.items()
                if has_score[members].all()
            },
        )

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
        for question, other in self._pairs:
            if part[question] and part[other]:
                both[question] = float(min(scores[question], scores[other]) == 1.0)
                weight[question] = 1.0
        return self._bootstrap.mean(both, weight)

    def _mean(self, values: Floats, part: Floats) -> Floats:
        return self._bootstrap.mean(values, part.astype(np.float64))
