"""The report of an evaluation, computed from its journal: rows, and reasons against it.

Figures are per cent, points for MME, and natural logarithms for log-probabilities. A positive
difference is in favour of the row's own case.

A row's scores are the totals of a benchmark's own scorer if the journal has them; differences and
intervals are always computed from single answers. A case with missing answers has no row.

A report is about the state that the user named first. Its figures have no interval if there are
fewer than :data:`MIN_IMAGES` images.

Pruning is compared with the resize control on the same questions at the same K, overall and by
kind: a smaller image needs no plugin, so a state has to beat it.

Without labels, the unpruned model's answer is the reference, and cases are compared by the share
of its tokens that greedy decoding gives after the tokens before them. Whole answers are no good
measure, because a long one rarely stays the same to its end; nor are log-probabilities, which also
fall when a model is less sure of a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vllm_autoprune.evaluation.journal import (
    Answer,
    Arm,
    Case,
    Contents,
    Question,
    Setup,
)
from vllm_autoprune.evaluation.scoring import Aggregates, Figures, Scoring
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, Floats, correlate_ranks

Winner = Literal["pruning", "resizing", "not decided", "too few images"]

MIN_IMAGES = 6
"""Fewest images for a verdict: with fewer, a sign test does not reach 5 % even if all favour one
side, and an interval from resampling them is too narrow."""

NOTHING_RIGHT = "no answer is right even with all tokens"
WRITE_AS_THE_MODEL = (
    "write the answers exactly as the model does (capitals, full stop, language), and ask it for a "
    "word or a number"
)
"""Advice for :data:`NOTHING_RIGHT`."""

_DIGITS = 4
_MIN_RANKED = 4
"""Fewest states for a rank correlation."""
_EXAMPLES = 6
PRUNING_ARMS: tuple[Arm, ...] = ("found", "autoprune", "base")
"""Arms of cases that prune by a state, controls left out."""


class Comparison(FrozenModel):
    """Difference between a case and the resize control at the same K.

    It is in percentage points of right answers, or of the reference's tokens if a score is
    agreement. ``kind`` is the kind of question, None for all questions.
    """

    case: str
    kind: str | None
    questions: int
    images: int
    difference: Estimate
    winner: Winner


class _Estimates(FrozenModel):
    """Figures with 95 % intervals, of a case or of its difference from another case."""

    accuracy: Estimate | None = None
    logprob: Estimate | None = None
    per_token: Estimate | None = None
    agreement: Estimate | None = None
    token_agreement: Estimate | None = None


class _Differences(_Estimates):
    """Differences between a case and another one on the same questions."""

    acc: Estimate | None = None
    mme: Estimate | None = None


class _Row(_Estimates):
    """Results of a case that has an answer to every question."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    accuracy_plus: float | None
    same: Estimate | None = None
    """Share of the reference's tokens before the first that differs, in per cent."""
    prompt_tokens: float | None
    """Mean number of tokens of a prompt; None if the server reported none."""
    to_full: _Differences | None = None
    to_base: _Differences | None = None
    to_resized: _Differences | None = None
    to_case: _Differences | None = None
    """Differences from the state that the report is about, at the same K."""


class _Example(FrozenModel):
    """A question to which the case that the report is about gives another answer."""

    id: str
    image: str
    question: str
    unpruned: str
    pruned: str | None
    per_token: float
    """ln p per token of the unpruned model's answer, minus its value in the unpruned model."""


class Report(FrozenModel):
    """Report of an evaluation; ``reasons`` says why it is not valid, and is empty if it is."""

    setup: Setup
    questions: int
    left_out: int = 0
    """Number of questions whose reference cannot be scored."""
    cut: int = 0
    """Number of references that the maximum length cut."""
    tokens: float | None = None
    """Mean length of the references, in tokens."""
    images: int
    reasons: tuple[str, ...]
    rows: tuple[_Row, ...]
    refused: tuple[Case, ...]
    resizing: tuple[Comparison, ...] = ()
    rank_correlations: Mapping[str, Estimate] = {}
    """Rank correlation of each figure of agreement with accuracy, over the states at one K."""
    examples: tuple[_Example, ...] = ()

    @property
    def case(self) -> Case | None:
        """The case that the report is about; None if only controls were measured."""
        return _choose_case(row.case for row in self.rows)

    @property
    def states(self) -> list[Case]:
        """Cases of the states that the user named; a base policy alone only if it was named."""
        return [row.case for row in self.rows if row.case.named]

    @property
    def row(self) -> _Row | None:
        """The row of :attr:`case`."""
        return next((row for row in self.rows if row.case == self.case), None)

    @property
    def full(self) -> _Row | None:
        """The row of the unpruned model."""
        return next((row for row in self.rows if row.case.name == "full"), None)

    @property
    def is_loss_shown(self) -> bool:
        """Whether the interval of the difference between :attr:`case` and all tokens is below 0."""
        if self.row is None or (less := self.row.to_full) is None:
            return False
        gap = less.accuracy or less.token_agreement
        return gap is not None and gap.high < 0

    @property
    def is_mostly_wrong(self) -> bool:
        """Whether more answers are wrong than right even with all tokens."""
        accuracy = None if self.full is None else self.full.accuracy
        return accuracy is not None and accuracy.value < 50

    @property
    def overall(self) -> Comparison | None:
        """Comparison of :attr:`case` with the resize control on all questions."""
        name = self.case and self.case.name
        return next(
            (c for c in self.resizing if c.case == name and c.kind is None), None
        )

    @property
    def frames(self) -> int:
        """Number of frames that are sampled of a video; 0 if the questions are about pictures."""
        return max((row.case.frames for row in self.rows), default=0)

    @property
    def valid(self) -> bool:
        """Whether there are no ``reasons`` against the report."""
        return not self.reasons

    @classmethod
    def build(cls, contents: Contents, more: Iterable[str] = ()) -> Report:
        """Compute the report of a journal that has a set-up; ``more`` are further reasons."""
        (setup,) = contents.setups.values()
        full = contents.answers.get("full", {})
        unscored = {
            id
            for id, answer in full.items()
            if answer.score is None and answer.failure is None
        }
        left_out = unscored if setup.score == "agrees" else set()
        questions = [q for q in contents.questions.values() if q.id not in left_out]
        references = [full[q.id] for q in questions if q.id in full]
        lengths = [answer.tokens for answer in references if answer.tokens]
        scoring = Scoring(questions, setup)
        figures = {
            name: scoring.figures(contents.answers[name])
            for name in contents.cases
            if questions and all(contents.is_answered(name, q.id) for q in questions)
        }
        reasons = [*contents.find_reasons(), *more]
        if left_out and not questions:
            reasons.insert(0, "full: no answer of the unpruned model can be scored")
        rows = (
            list(_build_rows(contents, questions, figures)) if "full" in figures else []
        )
        accuracy = figures["full"].metrics.get("accuracy") if rows else None
        if accuracy is not None and accuracy[0] == 0:  # pruning could then not be worse
            reasons.insert(0, f"full: {NOTHING_RIGHT} -> {WRITE_AS_THE_MODEL}")
        measured = {row.case.digest for row in rows}
        return cls(
            setup=setup,
            questions=len(questions),
            left_out=len(left_out),
            cut=sum(answer.cut for answer in references),
            tokens=round(sum(lengths) / len(lengths), 1) if lengths else None,
            images=_count_images(questions),
            reasons=tuple(reasons),
            rows=tuple(rows),
            # The server's own state, which has no K, is listed unless a case measured it.
            refused=tuple(
                case
                for case in contents.cases.values()
                if case.refused and (case.budget or case.digest not in measured)
            ),
            resizing=tuple(_compare_with_resizing(contents, questions, figures)),
            rank_correlations=_correlate_with_accuracy(
                [row.case for row in rows], figures, questions
            ),
            examples=tuple(
                _Example(
                    id=answer.question,
                    image=contents.questions[answer.question].image,
                    question=contents.questions[answer.question].text,
                    unpruned=full[answer.question].text or "",
                    pruned=answer.text,
                    per_token=round(fall, _DIGITS),
                )
                for fall, answer in choose_examples(contents)
            ),
        )

    def format_json(self) -> str:
        """The report as JSON, without the states that were sent; the journal contains those.

        Bounds of a figure without interval are null.
        """
        sent = {"pruning"}
        content = self.model_dump_json(
            exclude={"rows": {"__all__": {"case": sent}}, "refused": {"__all__": sent}}
        )
        record = {"valid": self.valid, **json.loads(content)}
        return json.dumps(record, indent=1) + "\n"


def _choose_case(cases: Iterable[Case]) -> Case | None:
    """The case that a report is about: the state that was named first, at its largest budget."""
    states = [case for case in cases if case.named and not case.refused]
    earliest = min((case.named for case in states), default=0)
    about = [case for case in states if case.named == earliest]
    return max(about, key=lambda case: case.budget_order, default=None)


def _correlate_with_accuracy(
    cases: Sequence[Case],
    figures: Mapping[str, Figures],
    questions: Sequence[Question],
) -> dict[str, Estimate]:
    """Spearman's rank correlation with accuracy, by the name of each figure of agreement.

    It is over the states at the K that the report is about; empty for fewer than
    :data:`_MIN_RANKED` states.
    """
    about = _choose_case(cases)
    correlations = dict[str, Estimate]()
    ranked = [
        case for case in cases if case.named and about and case.budget == about.budget
    ]
    metrics = [figures[case.name].metrics for case in ranked]
    for name in ("token_agreement", "agreement", "per_token"):
        if len(ranked) >= _MIN_RANKED and all(
            {name, "accuracy"} <= measured.keys() for measured in metrics
        ):
            pairs = (
                [measured[key] for measured in metrics] for key in (name, "accuracy")
            )
            correlation = correlate_ranks(*map(np.array, pairs))
            correlations[name] = _estimate(correlation, questions, 3)
    return correlations


def choose_examples(contents: Contents) -> list[tuple[float, Answer]]:
    """Answers that differ from the unpruned model's, in the case that a report is about.

    An image has at most one. Each comes with its ln p per token minus that of the unpruned model;
    the largest falls are first.
    """
    case = _choose_case(contents.cases.values())
    full = contents.answers.get("full", {})
    falls = [
        (answer.per_token - reference.per_token, answer)
        for answer in contents.answers.get(case.name if case else "", {}).values()
        if answer.agrees is False
        and (reference := full.get(answer.question)) is not None
        and answer.per_token is not None
        and reference.per_token is not None
    ]
    changed = dict[str, tuple[float, Answer]]()
    for fall, answer in sorted(falls, key=lambda pair: pair[0]):
        changed.setdefault(contents.questions[answer.question].image, (fall, answer))
    return list(changed.values())[:_EXAMPLES]


def _build_rows(
    contents: Contents, questions: Sequence[Question], figures: Mapping[str, Figures]
) -> Iterator[_Row]:
    cases = [contents.cases[name] for name in figures]
    about = _choose_case(cases)
    benchmarks = {q.benchmark for q in questions}
    divisor = contents.setups[""].mme_divisor
    # The total of a benchmark's own scorer is preferred to the score computed from answers.
    scores = {}
    for name in figures:
        computed = {
            key: float(score[0]) for key, score in figures[name].benchmarks.items()
        }
        totals = contents.totals.get(name, {})
        scores[name] = computed | {key: total.value for key, total in totals.items()}
    for case in cases:
        points = scores[case.name]
        metrics = figures[case.name].metrics
        if not benchmarks <= points.keys():
            continue
        # The differences are paired, because all figures use the same resamples.
        fields = dict[str, Any]()
        for field, other in (
            ("to_full", "full"),
            ("to_base", case.base),
            ("to_resized", f"resized@{case.budget}"),
            (
                "to_case",
                f"{about.label}@{case.budget}" if about and case.named else "",
            ),
        ):
            if other in figures and other != case.name:
                less = figures[other].metrics
                names = metrics.keys() & less.keys() & _Differences.model_fields.keys()
                estimates = {
                    name: _estimate_finite(metrics[name] - less[name], questions)
                    for name in names
                }
                fields[field] = _Differences(**estimates)
        estimated = metrics.keys() & {*_Estimates.model_fields, "same"}
        fields |= {
            name: _estimate_finite(metrics[name], questions) for name in estimated
        }
        plus = (
            _estimate_finite(metrics["accuracy_plus"], questions)
            if "accuracy_plus" in metrics
            else None
        )
        answers = contents.answers[case.name].values()
        lengths = [answer.prompt_tokens for answer in answers if answer.prompt_tokens]
        yield _Row(
            case=case,
            benchmarks={name: round(score, _DIGITS) for name, score in points.items()},
            all=Aggregates.of(points, scores["full"], divisor, _DIGITS),
            accuracy_plus=None if plus is None else plus.value,
            prompt_tokens=round(sum(lengths) / len(lengths), 2) if lengths else None,
            **fields,
        )


def _count_images(questions: Sequence[Question]) -> int:
    return len({question.image for question in questions})


def _estimate(
    figure: Floats, questions: Sequence[Question], digits: int = _DIGITS
) -> Estimate:
    """Rounded value of a figure over ``questions``, with an interval if their images suffice."""
    estimate = Estimate.of(figure).rounded(digits)
    too_few = _count_images(questions) < MIN_IMAGES
    return estimate.without_interval() if too_few else estimate


def _estimate_finite(figure: Floats, questions: Sequence[Question]) -> Estimate | None:
    """As :func:`_estimate`; None if the value is not finite."""
    return _estimate(figure, questions) if np.isfinite(figure[0]) else None


def _compare_with_resizing(
    contents: Contents, questions: Sequence[Question], figures: Mapping[str, Figures]
) -> Iterator[Comparison]:
    """Comparisons of every pruned case that has a resize control, overall and then by kind."""
    kinds = {question.topic for question in questions}
    for name, case in contents.cases.items():
        control = figures.get(f"resized@{case.budget}")
        if name not in figures or control is None or case.arm not in PRUNING_ARMS:
            continue
        for kind, decisive in figures[name].topics.items():
            if kind not in control.topics or (kind is not None and len(kinds) == 1):
                continue
            members = [
                question for question in questions if kind in (None, question.topic)
            ]
            images = _count_images(members)
            difference = _estimate(decisive - control.topics[kind], members)
            winner: Winner = "not decided"
            if images < MIN_IMAGES:
                winner = "too few images"
            elif difference.low > 0 or difference.high < 0:
                winner = "pruning" if difference.low > 0 else "resizing"
            yield Comparison(
                case=name,
                kind=kind,
                questions=len(members),
                images=images,
                difference=difference,
                winner=winner,
            )
