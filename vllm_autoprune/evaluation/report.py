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

from vllm_autoprune.evaluation.journal import (
    MME,
    Case,
    Contents,
    EvaluationError,
    Question,
    Setup,
    kind_of,
)
from vllm_autoprune.evaluation.scoring import (
    MMBENCH,
    Figures,
    Scores,
    Scoring,
    accuracy,
    mean_of_ratios,
    ratio_of_means,
)
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, Floats, estimate

Winner = Literal["pruning", "resizing", "not decided", "too few images"]

MIN_IMAGES = 6
"""Images below which there is no verdict: even if all of them favoured one side, a sign test would
not reach 5 %, and an interval by resampling them is too narrow."""

_POLICY_ARMS = ("base", "autoprune", "found")


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
    winner: Winner
    more_tokens: float = 0.0
    """Mean tokens that its prompts have more: a resized image may have a few less than K."""
    stated: bool
    """Whether the case is a state that was to be evaluated, not what it is compared with."""


def compare_with_resizing(
    cases: Sequence[Case],
    questions: Sequence[Question],
    figures: Mapping[str, Figures],
    lengths: Mapping[str, float],
) -> Iterator[Comparison]:
    """Each case that runs a policy and has a resize control, overall and then by kind.

    ``lengths`` are mean prompt tokens by case, of those where they are known.
    """
    controls = {case.budget: case for case in cases if case.arm == "resized"}
    bases = {case.base for case in cases}
    several = len({kind_of(question) for question in questions}) > 1
    for case in cases:
        control = controls.get(case.budget)
        if control is None or case.arm not in _POLICY_ARMS:
            continue
        by_kind, control_by_kind = figures[case.name].kinds, figures[control.name].kinds
        known = case.name in lengths and control.name in lengths
        more_tokens = lengths[case.name] - lengths[control.name] if known else 0.0
        stated = case.arm in ("found", "autoprune") or (
            case.arm == "base" and case.name not in bases
        )
        for kind in by_kind:
            if kind not in control_by_kind or (kind is not None and not several):
                continue
            asked = [q for q in questions if kind is None or kind_of(q) == kind]
            images = len({question.image for question in asked})
            difference = estimate(np.subtract(by_kind[kind], control_by_kind[kind])).rounded(4)
            yield Comparison(
                case=case.name,
                label=case.label,
                budget=case.budget,
                kind=kind,
                questions=len(asked),
                images=images,
                difference=difference,
                winner=find_winner(difference, images),
                more_tokens=round(more_tokens, 2),
                stated=stated,
            )


def find_winner(difference: Estimate, images: int) -> Winner:
    """Which of the two is better by an interval without 0, on enough images."""
    if images < MIN_IMAGES:
        return "too few images"
    if difference.low > 0:
        return "pruning"
    return "resizing" if difference.high < 0 else "not decided"


_DIGITS = 4


class Differences(FrozenModel):
    """A case minus another one on the same questions, with 95 % intervals."""

    acc: Estimate | None
    accuracy: Estimate | None
    mme: Estimate | None
    logprob: Estimate | None


class Aggregates(FrozenModel):
    """*Acc.*, and *Rel.* by both definitions; None in place of a division by zero."""

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None


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
    cases = [case for case in contents.cases.values() if _is_complete(contents, case)]
    questions = list(contents.questions.values())
    scoring = Scoring(questions, setup.mme_divisor)
    figures = {case.name: scoring.figures(contents.answers[case.name]) for case in cases}
    full = next((case for case in cases if case.arm == "full"), None)
    benchmarks = list(dict.fromkeys(question.benchmark for question in questions))
    controls = {case.budget: case.name for case in cases if case.arm == "resized"}
    means = {case.name: _mean_length(contents, case) for case in cases}
    lengths = {name: length for name, length in means.items() if length is not None}
    rows = []
    if full is not None:
        scores = {case.name: _scores(contents, case, figures[case.name]) for case in cases}
        for case in cases:
            if set(scores[case.name]) >= set(benchmarks):
                control = figures.get(controls.get(case.budget, ""))
                rows.append(_row(contents, case, full, scores, figures, setup.mme_divisor, control))
    return Report(
        setup=setup,
        questions=len(questions),
        images=len({question.image for question in questions}),
        reasons=(*_reasons(contents), *_full_reasons(full, figures), *more),
        rows=tuple(rows),
        refused=tuple(case for case in contents.cases.values() if case.refused),
        resizing=tuple(compare_with_resizing(cases, questions, figures, lengths)),
    )


def _scores(contents: Contents, case: Case, figures: Figures) -> Scores:
    """Score of each benchmark: the total of its own scorer, or else computed from answers."""
    computed = {name: float(figure[0]) for name, figure in figures.benchmarks.items()}
    totals = contents.totals.get(case.name, {})
    return computed | {name: total.value for name, total in totals.items()}


def _row(
    contents: Contents,
    case: Case,
    full: Case,
    scores: Mapping[str, Scores],
    figures: Mapping[str, Figures],
    divisor: float,
    resized: Figures | None,
) -> Row:
    ours, base = figures[case.name], figures.get(case.base)
    own_scores, full_scores = scores[case.name], scores[full.name]
    length = _mean_length(contents, case)
    plus = ours.accuracy_plus
    return Row(
        case=case,
        benchmarks={name: round(score, 4) for name, score in own_scores.items()},
        all=_aggregates(own_scores, full_scores, divisor, ()),
        without_mmbench=_aggregates(own_scores, full_scores, divisor, MMBENCH)
        if set(MMBENCH) & set(own_scores) and set(own_scores) - set(MMBENCH)
        else None,
        accuracy=_estimate(ours.accuracy),
        accuracy_plus=None if plus is None or math.isnan(plus[0]) else round(float(plus[0]), 4),
        prompt_tokens=None if length is None else round(length, 2),
        to_full=None if case is full else _differences(ours, figures[full.name]),
        to_base=None if base is None else _differences(ours, base),
        to_resized=None if resized is None or resized is ours else _differences(ours, resized),
    )


def _mean_length(contents: Contents, case: Case) -> float | None:
    """Mean prompt tokens of a case, where the server told any."""
    lengths = [a.prompt_tokens for a in contents.answers[case.name].values() if a.prompt_tokens]
    return sum(lengths) / len(lengths) if lengths else None


def _aggregates(scores: Scores, full: Scores, divisor: float, without: Sequence[str]) -> Aggregates:
    acc = accuracy(scores, divisor, without)
    divisors = [value for name, value in full.items() if name not in without]
    return Aggregates(
        acc=round(acc, 4),
        ratio_of_means=round(ratio_of_means(scores, full, divisor, without), 4)
        if any(divisors)
        else None,
        mean_of_ratios=round(mean_of_ratios(scores, full, without), 4) if all(divisors) else None,
    )


def _differences(ours: Figures, other: Figures) -> Differences:
    return Differences(
        acc=_difference(ours.acc, other.acc),
        accuracy=_difference(ours.accuracy, other.accuracy),
        mme=_difference(ours.benchmarks.get(MME), other.benchmarks.get(MME)),
        logprob=_difference(ours.logprob, other.logprob),
    )


def _difference(ours: Floats | None, other: Floats | None) -> Estimate | None:
    return None if ours is None or other is None else _estimate(np.subtract(ours, other))


def _estimate(figure: Floats | None) -> Estimate | None:
    """Rounded value and interval; None for a figure without a finite value."""
    if figure is None or not np.isfinite(figure[0]):
        return None
    return estimate(figure).rounded(_DIGITS)


def _is_complete(contents: Contents, case: Case) -> bool:
    """Whether every question has an answer in this case."""
    return bool(contents.questions) and all(
        contents.is_answered(case.name, question) for question in contents.questions
    )


def _reasons(contents: Contents) -> Iterator[str]:
    """Reasons against an evaluation in any suite: failures, missing answers, no full model."""
    if not contents.questions:
        yield "there are no questions"
        return
    cases = [case for case in contents.cases.values() if not case.refused]
    if not any(case.arm == "full" for case in cases):
        yield "the full model is not among the cases: there is nothing to compare with"
    total = len(contents.questions)
    empty = [case.name for case in cases if not contents.answers.get(case.name)]
    if empty:
        yield f"{_first_names(empty)}: no question was answered"
    for case in cases:
        answers = contents.answers.get(case.name, {})
        failures = [answer.failure for answer in answers.values() if answer.failure is not None]
        if failures:
            yield f"{case.name}: {len(failures)} of {total:,} requests failed: {failures[0]}"
        if 0 < len(answers) < total:
            missing = [q for name, q in contents.questions.items() if name not in answers]
            where = _first_names(list(dict.fromkeys(question.benchmark for question in missing)))
            yield f"{case.name}: {len(answers):,} of {total:,} answers; {where} is incomplete"


def _full_reasons(full: Case | None, figures: Mapping[str, Figures]) -> Iterator[str]:
    """A full model without one right answer: whatever prunes can then be no worse."""
    right = None if full is None else figures[full.name].accuracy
    if right is not None and right[0] == 0:
        yield (
            "full: no answer is right even with all tokens -> write the answers exactly as the "
            "model does (capitals, full stop, language), and ask it for a word or a number"
        )


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
