"""A journal summed up: rows with aggregates and paired differences, and the verdict.

Knows nothing about where answers come from. Totals of a benchmark's own scorer, where a journal has
them, are the row's scores; differences and intervals are always made of single answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.accuracy.aggregate import (
    MMBENCH,
    Scores,
    accuracy,
    mean_of_ratios,
    ratio_of_means,
)
from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.journal import Contents
from benchmarks.accuracy.records import MME, Case
from benchmarks.accuracy.report import Aggregates, Gaps, Report, Row
from benchmarks.accuracy.resampling import Floats, measured
from benchmarks.accuracy.scoring import Figures, Scoring
from benchmarks.accuracy.verdict import complete, reasons
from offline_search.ledger.records import IntervalEstimate


def summarize(contents: Contents, more: Iterable[str] = ()) -> Report:
    """The report of a journal; ``more`` are further reasons against it.

    Raises :class:`EvaluationError` for a journal in which nothing was opened.
    """
    opened = contents.opened
    if opened is None:
        raise EvaluationError("the journal is empty -> run an evaluation first")
    cases = [case for case in contents.cases.values() if complete(contents, case)]
    questions = list(contents.questions.values())
    scoring = Scoring(questions, opened.mme_divisor)
    figures = {case.name: scoring.figures(contents.answers[case.name]) for case in cases}
    full = next((case for case in cases if case.arm == "full"), None)
    benchmarks = list(dict.fromkeys(question.benchmark for question in questions))
    rows = []
    if full is not None:
        scores = {case.name: _scores(contents, case, figures[case.name]) for case in cases}
        for case in cases:
            if set(scores[case.name]) >= set(benchmarks):
                rows.append(_row(contents, case, full, scores, figures, opened.mme_divisor))
    return Report(
        opened=opened,
        questions=len(questions),
        images=len({question.image for question in questions}),
        reasons=(*reasons(contents), *more),
        rows=tuple(rows),
        refused=tuple(case for case in contents.cases.values() if case.refused),
    )


def _scores(contents: Contents, case: Case, figures: Figures) -> Scores:
    """By benchmark, as its own scorer has it, or else computed here."""
    ours = {name: float(figure[0]) for name, figure in figures.benchmarks.items()}
    totals = contents.totals.get(case.name, {})
    return ours | {name: total.value for name, total in totals.items()}


def _row(
    contents: Contents,
    case: Case,
    full: Case,
    scores: Mapping[str, Scores],
    figures: Mapping[str, Figures],
    divisor: float,
) -> Row:
    own, base = figures[case.name], figures.get(case.base)
    mine, all_ = scores[case.name], scores[full.name]
    lengths = [a.prompt_tokens for a in contents.answers[case.name].values() if a.prompt_tokens]
    plus = own.accuracy_plus
    return Row(
        case=case,
        benchmarks={name: round(score, 4) for name, score in mine.items()},
        all=_aggregates(mine, all_, divisor, ()),
        without_mmbench=_aggregates(mine, all_, divisor, MMBENCH)
        if set(MMBENCH) & set(mine) and set(mine) - set(MMBENCH)
        else None,
        accuracy=None if own.accuracy is None else measured(own.accuracy),
        accuracy_plus=None if plus is None or math.isnan(plus[0]) else round(float(plus[0]), 4),
        prompt_tokens=round(sum(lengths) / len(lengths), 2) if lengths else None,
        to_full=None if case is full else _gaps(own, figures[full.name]),
        to_base=None if base is None else _gaps(own, base),
    )


def _aggregates(scores: Scores, full: Scores, divisor: float, without: Sequence[str]) -> Aggregates:
    acc = accuracy(scores, divisor, without)
    kept = [value for name, value in full.items() if name not in without]
    return Aggregates(
        acc=round(acc, 4),
        ratio_of_means=round(ratio_of_means(scores, full, divisor, without), 4)
        if any(kept)
        else None,
        mean_of_ratios=round(mean_of_ratios(scores, full, without), 4) if all(kept) else None,
    )


def _gaps(own: Figures, other: Figures) -> Gaps:
    return Gaps(
        acc=_gap(own.acc, other.acc),
        accuracy=_gap(own.accuracy, other.accuracy),
        mme=_gap(own.benchmarks.get(MME), other.benchmarks.get(MME)),
        logprob=_gap(own.logprob, other.logprob),
    )


def _gap(own: Floats | None, other: Floats | None) -> IntervalEstimate | None:
    return None if own is None or other is None else measured(np.subtract(own, other))
