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

import numpy as np
from numpy.typing import NDArray

from vllm_autoprune.evaluation.journal import MME, PAIRS, Answer, Question, Setup
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import ClusterBootstrap, Floats

_Mask = NDArray[np.bool_]

Scores = Mapping[str, float]
"""Scores by benchmark, each in its official unit: points for MME, per cent for all others."""


class Aggregates(FrozenModel):
    """*Acc.*, and *Rel.* by both definitions; None in place of a division by zero."""

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None

    @classmethod
    def of(
        cls, scores: Scores, full: Scores, mme_divisor: float, digits: int
    ) -> Aggregates:
        """Rounded figures of scores beside those of the full model on the same benchmarks.

        The divisor of MME cancels out in ratios of scores.
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
    """Figures of one case; each is the value and then its resamples, ``(1 + draws,)``."""

    benchmarks: Mapping[str, Floats]
    """In per cent, MME in points; benchmarks without scores of single answers are left out."""
    topics: Mapping[str | None, Floats]
    """What decides, by topic of question, under None of all of them: the mean score in per cent, or
    ``token_agreement`` where a score is agreement."""
    metrics: Mapping[str, Floats]
    """*Acc.* (``acc``), MME (``mme``), mean score and accuracy+ of all questions that have a score,
    in per cent (``accuracy``, ``accuracy_plus``), where a score says that an answer is right; mean
    log-probability of the reference answer (``logprob``). Of the unpruned model's answer, in per
    cent: how often it is given (``agreement``), the share of its tokens that greedy decoding gives
    after the ones before them (``token_agreement``), and of those before the first that differs
    (``same``); and ln p by token (``per_token``). Those for which the answers suffice."""


class Scoring:
    """Scoring of the answers to one set of questions, with the same resamples for every case."""

    def __init__(self, questions: Sequence[Question], setup: Setup) -> None:
        self._questions = questions
        self._divisor = setup.mme_divisor
        self._has_labels = setup.score == "right"
        self._bootstrap = ClusterBootstrap([question.image for question in questions])
        pairs: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            if question.pair:
                pairs.setdefault(question.pair, []).append(place)
        self._pairs = [places for places in pairs.values() if len(places) == 2]

    def figures(self, answers: Mapping[str, Answer]) -> Figures:  # noqa: C901
        """Figures of one case; ``answers`` has one answer to every question."""
        ordered = [answers[question.id] for question in self._questions]

        def fill(values: Sequence[float | None]) -> tuple[Floats, _Mask]:
            """The values, 0 where one is missing, and a mask of those that are not."""
            known = np.asarray([value is not None for value in values])
            return np.asarray([value or 0.0 for value in values]), known

        scores, scored = fill([answer.score for answer in ordered])
        matching, has_tokens = fill(
            [answer.by_token(answer.matching) for answer in ordered]
        )
        both = np.zeros(len(scores))
        paired = np.zeros(len(scores))
        for question, other in self._pairs:
            both[question] = float(min(scores[question], scores[other]) == 1.0)
            paired[question] = scored[question] and scored[other]

        def mean(members: _Mask) -> Floats:
            return 100 * self._bootstrap.mean(scores, members.astype(np.float64))

        def plus(members: _Mask) -> Floats:
            """Share of the pairs within ``members`` with both answers right."""
            return 100 * self._bootstrap.mean(both, paired * members)

        deciding, decided = (
            (scores, scored) if self._has_labels else (matching, has_tokens)
        )
        everything = np.ones(len(scores), dtype=bool)
        by_topic = [
            (None, everything),
            *self._split([q.topic for q in self._questions]),
        ]
        topics = {
            name: 100 * self._bootstrap.mean(deciding, part.astype(np.float64))
            for name, part in by_topic
            if decided[part].all()
        }
        benchmarks = dict[str, Floats]()
        metrics = dict[str, Floats]()
        categories = self._split([question.category for question in self._questions])
        for name, members in self._split(
            [question.benchmark for question in self._questions]
        ):
            if not scored[members].all():
                continue
            if name in (MME, PAIRS):  # accuracy and accuracy+ of each category
                parts = [
                    part for _, mask in categories if (part := mask & members).any()
                ]
                benchmarks[name] = np.sum(
                    [mean(part) + plus(part) for part in parts], axis=0
                )
                if name == MME:
                    metrics["mme"] = benchmarks[name]
                else:
                    benchmarks[name] = benchmarks[name] / (2 * len(parts))
            else:
                benchmarks[name] = mean(members)
        if self._has_labels and benchmarks.keys() == {
            q.benchmark for q in self._questions
        }:
            divisors = [self._divisor if name == MME else 1.0 for name in benchmarks]
            scaled = [
                points / by
                for points, by in zip(benchmarks.values(), divisors, strict=True)
            ]
            metrics["acc"] = np.mean(scaled, axis=0)
        if self._has_labels and scored.any():
            metrics["accuracy"] = mean(scored)
            if paired.any():
                metrics["accuracy_plus"] = plus(scored)
        for name, unit, (values, known) in (
            ("logprob", 1, fill([answer.logprob for answer in ordered])),
            ("per_token", 1, fill([answer.per_token for answer in ordered])),
            ("agreement", 100, fill([answer.agrees for answer in ordered])),
            ("token_agreement", 100, (matching, has_tokens)),
            ("same", 100, fill([answer.by_token(answer.same) for answer in ordered])),
        ):
            if known.any():
                metrics[name] = unit * self._bootstrap.mean(
                    values, known.astype(np.float64)
                )
        return Figures(benchmarks, topics, metrics)

    def _split(self, names: Sequence[str]) -> list[tuple[str, _Mask]]:
        """Every name in the order of questions, with a mask of the questions that have it."""
        return [(name, np.asarray(names) == name) for name in dict.fromkeys(names)]
