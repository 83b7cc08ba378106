"""The report of an evaluation, computed from its journal: one row per case, reasons against it.

Figures are per cent, points for MME, and natural logarithms for log-probabilities. A positive
difference is in favour of the row's own case.

A row's scores are the totals of a benchmark's own scorer if the journal has them; differences and
intervals are always computed from single answers. A case without all answers has no row.

Pruning is compared with the resize control on the same questions, at the same K, overall and by
kind: a smaller image is what an operator has without a plugin, so a state has to beat it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from vllm_autoprune.evaluation.journal import MME, Case, Contents, EvaluationError, Setup
from vllm_autoprune.evaluation.scoring import (
    MMBENCH,
    Aggregates,
    Figures,
    Scoring,
    aggregate,
)
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, Floats, estimate

_Winner = Literal["pruning", "resizing", "not decided", "too few images"]

MIN_IMAGES = 6
"""Images below which there is no verdict: even if all of them favoured one side, a sign test would
not reach 5 %, and an interval by resampling them is too narrow."""

_POLICY_ARMS = ("base", "autoprune", "found")
_DIGITS = 4


class Comparison(FrozenModel):
    """A case less the resize control at the same K, in points of per cent right.

    ``kind`` is one kind of question, None for all of them.
    """

    case: str
    label: str
    budget: int
    kind: str | None
    questions: int
    images: int
    difference: Estimate
    winner: _Winner
    more_tokens: float = 0.0
    """Mean tokens that its prompts have more: a resized image may have a few less than K."""
    stated: bool
    """Whether the case is a state that was to be evaluated, not what it is compared with."""


class Differences(FrozenModel):
    """A case minus another one on the same questions, with 95 % intervals."""

    acc: Estimate | None
    accuracy: Estimate | None
    mme: Estimate | None
    logprob: Estimate | None


class Row(FrozenModel):
    """Results of one case, every question of which has an answer."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    without_mmbench: Aggregates | None
    accuracy: Estimate | None
    accuracy_plus: float | None
    prompt_tokens: float | None
    to_full: Differences | None
    to_base: Differences | None
    to_resized: Differences | None = None


class Report(FrozenModel):
    """Report of an evaluation; ``reasons`` say why it is not valid, and are empty if it is."""

    setup: Setup
    questions: int
    images: int
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    refused: tuple[Case, ...]
    resizing: tuple[Comparison, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the report."""
        return not self.reasons

    def row(self, name: str) -> Row | None:
        """The row of a case, if it was measured."""
        return next((row for row in self.rows if row.case.name == name), None)


def build_report(contents: Contents, more: Iterable[str] = ()) -> Report:
    """The report of a journal; ``more`` are further reasons against it.

    Raises :class:`EvaluationError` for an empty journal.
    """
    setup = contents.setup
    if setup is None:
        raise EvaluationError("the journal is empty -> run an evaluation first")
    questions = list(contents.questions.values())
    cases = [
        case
        for case in contents.cases.values()
        if questions and all(contents.is_answered(case.name, name) for name in contents.questions)
    ]
    scoring = Scoring(questions, setup.mme_divisor)
    figures = {case.name: scoring.figures(contents.answers[case.name]) for case in cases}
    full = next((case for case in cases if case.arm == "full"), None)
    reasons = [*_reasons(contents), *more]
    if full is not None and (right := figures[full.name].accuracy) is not None and right[0] == 0:
        # Whatever prunes can then be no worse.
        reasons.insert(
            0,
            "full: no answer is right even with all tokens -> write the answers exactly as the "
            "model does (capitals, full stop, language), and ask it for a word or a number",
        )
    return Report(
        setup=setup,
        questions=len(questions),
        images=len({question.image for question in questions}),
        reasons=tuple(reasons),
        rows=() if full is None else tuple(_rows(contents, cases, full, figures)),
        refused=tuple(case for case in contents.cases.values() if case.refused),
        resizing=tuple(_compare_with_resizing(contents, cases, figures)),
    )


def _rows(
    contents: Contents, cases: Sequence[Case], full: Case, figures: Mapping[str, Figures]
) -> Iterator[Row]:
    assert contents.setup is not None
    divisor = contents.setup.mme_divisor
    benchmarks = {question.benchmark for question in contents.questions.values()}
    controls = {case.budget: figures[case.name] for case in cases if case.arm == "resized"}
    scores = {}
    for case in cases:
        # The total of a benchmark's own scorer, or else what is computed from answers.
        computed = {name: float(f[0]) for name, f in figures[case.name].benchmarks.items()}
        totals = contents.totals.get(case.name, {})
        scores[case.name] = computed | {name: total.value for name, total in totals.items()}
    full_scores = scores[full.name]
    for case in cases:
        case_scores, case_figures = scores[case.name], figures[case.name]
        if not benchmarks <= case_scores.keys():
            continue
        # Not a number where no pair has two scores.
        plus, length = case_figures.accuracy_plus, _mean_length(contents, case)
        others = {"to_full": figures[full.name], "to_base": figures.get(case.base),
                  "to_resized": controls.get(case.budget)}  # fmt: skip
        yield Row(
            case=case,
            benchmarks={name: round(score, _DIGITS) for name, score in case_scores.items()},
            all=aggregate(case_scores, full_scores, divisor).rounded(_DIGITS),
            without_mmbench=aggregate(case_scores, full_scores, divisor, MMBENCH).rounded(_DIGITS)
            if 0 < len(case_scores.keys() - set(MMBENCH)) < len(case_scores)
            else None,
            accuracy=_estimate(case_figures.accuracy),
            accuracy_plus=None
            if plus is None or math.isnan(plus[0])
            else round(float(plus[0]), _DIGITS),
            prompt_tokens=None if length is None else round(length, 2),
            **{
                name: None
                if other is None or other is case_figures
                else _subtract(case_figures, other)
                for name, other in others.items()
            },
        )


def _mean_length(contents: Contents, case: Case) -> float | None:
    """Mean prompt tokens of a case, where the server told any."""
    lengths = [a.prompt_tokens for a in contents.answers[case.name].values() if a.prompt_tokens]
    return sum(lengths) / len(lengths) if lengths else None


def _subtract(minuend: Figures, other: Figures) -> Differences:
    def difference(figure: Floats | None, other: Floats | None) -> Estimate | None:
        return None if figure is None or other is None else _estimate(np.subtract(figure, other))

    return Differences(
        acc=difference(minuend.acc, other.acc),
        accuracy=difference(minuend.accuracy, other.accuracy),
        mme=difference(minuend.benchmarks.get(MME), other.benchmarks.get(MME)),
        logprob=difference(minuend.logprob, other.logprob),
    )


def _estimate(figure: Floats | None) -> Estimate | None:
    """Rounded value and interval; None for a figure without a finite value."""
    if figure is None or not np.isfinite(figure[0]):
        return None
    return estimate(figure).rounded(_DIGITS)


def _reasons(contents: Contents) -> Iterator[str]:
    """Reasons against an evaluation in any suite: failures, missing answers, no full model."""
    if not contents.questions:
        yield "there are no questions"
        return
    cases = [case for case in contents.cases.values() if not case.refused]
    if not any(case.arm == "full" for case in cases):
        yield "the full model is not among the cases: there is nothing to compare with"
    total = len(contents.questions)
    if empty := [case.name for case in cases if not contents.answers.get(case.name)]:
        yield f"{_shorten(empty)}: no question was answered"
    for case in cases:
        answers = contents.answers.get(case.name, {})
        failures = [answer.failure for answer in answers.values() if answer.failure is not None]
        if failures:
            yield f"{case.name}: {len(failures)} of {total:,} requests failed: {failures[0]}"
        if 0 < len(answers) < total:
            missing = [q.benchmark for name, q in contents.questions.items() if name not in answers]
            where = _shorten(list(dict.fromkeys(missing)))
            yield f"{case.name}: {len(answers):,} of {total:,} answers; {where} is incomplete"


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _compare_with_resizing(
    contents: Contents, cases: Sequence[Case], figures: Mapping[str, Figures]
) -> Iterator[Comparison]:
    """Each case that runs a policy and has a resize control, overall and then by kind."""
    controls = {case.budget: case for case in cases if case.arm == "resized"}
    bases = {case.base for case in cases}
    questions = contents.questions.values()
    several = len({question.topic for question in questions}) > 1
    for case in cases:
        control = controls.get(case.budget)
        if control is None or case.arm not in _POLICY_ARMS:
            continue
        length, control_length = _mean_length(contents, case), _mean_length(contents, control)
        known = length is not None and control_length is not None
        control_topics = figures[control.name].topics
        for kind, right in figures[case.name].topics.items():
            if kind not in control_topics or (kind is not None and not several):
                continue
            asked = [question for question in questions if kind in (None, question.topic)]
            images = len({question.image for question in asked})
            difference = estimate(np.subtract(right, control_topics[kind])).rounded(_DIGITS)
            yield Comparison(
                case=case.name,
                label=case.label,
                budget=case.budget,
                kind=kind,
                questions=len(asked),
                images=images,
                difference=difference,
                winner=find_winner(difference, images),
                more_tokens=round((length or 0) - (control_length or 0), 2) if known else 0.0,
                stated=case.arm != "base" or case.name not in bases,
            )


def find_winner(difference: Estimate, images: int) -> _Winner:
    """Which of the two is better by an interval without 0, on enough images."""
    if images < MIN_IMAGES:
        return "too few images"
    if difference.low > 0:
        return "pruning"
    return "resizing" if difference.high < 0 else "not decided"
