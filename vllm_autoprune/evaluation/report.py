"""The report of an evaluation, computed from its journal: one row per case, reasons against it.

Figures are per cent, points for MME, and natural logarithms for log-probabilities. A positive
difference is in favour of the row's own case.

A row's scores are the totals of a benchmark's own scorer if the journal has them; differences and
intervals are always computed from single answers. A case without all answers has no row.

Pruning is compared with the resize control on the same questions, at the same K, overall and by
kind: a smaller image is what an operator has without a plugin, so a state has to beat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from vllm_autoprune.evaluation.journal import Case, Contents, EvaluationError, Setup
from vllm_autoprune.evaluation.scoring import MMBENCH, Aggregates, Figures, Scoring, aggregate
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, Floats, estimate

Winner = Literal["pruning", "resizing", "not decided", "too few images"]

MIN_IMAGES = 6
"""Images below which there is no verdict: even if all of them favoured one side, a sign test would
not reach 5 %, and an interval by resampling them is too narrow."""

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
    winner: Winner
    more_tokens: float = 0.0
    """Mean tokens that its prompts have more: a resized image may have a few less than K."""
    stated: bool
    """Whether the case is a state that was to be evaluated, not what it is compared with."""


class Differences(FrozenModel):
    """A case minus another one on the same questions, with 95 % intervals."""

    acc: Estimate | None = None
    accuracy: Estimate | None = None
    mme: Estimate | None = None
    logprob: Estimate | None = None


class Row(FrozenModel):
    """Results of one case, every question of which has an answer."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    without_mmbench: Aggregates | None
    accuracy: Estimate | None
    accuracy_plus: float | None
    prompt_tokens: float | None
    to_full: Differences | None = None
    to_base: Differences | None = None
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
    if not contents.setups:
        raise EvaluationError("the journal is empty -> run an evaluation first")
    (setup,) = contents.setups.values()
    questions = list(contents.questions.values())
    complete = [
        case
        for case in contents.cases.values()
        if questions and all(contents.is_answered(case.name, name) for name in contents.questions)
    ]
    scoring = Scoring(questions, setup.mme_divisor)
    figures = {case.name: scoring.figures(contents.answers[case.name]) for case in complete}
    full = next((case.name for case in complete if case.arm == "full"), None)
    reasons = [*_find_reasons(contents), *more]
    rows: list[Row] = []
    if full is not None:
        right = figures[full].metrics.get("accuracy")
        if right is not None and right[0] == 0:  # whatever prunes can then be no worse
            reason = "full: no answer is right even with all tokens -> write the answers exactly "
            reason += "as the model does (capitals, full stop, language), and ask it for a word or "
            reasons.insert(0, f"{reason}a number")
        rows = list(_build_rows(contents, setup.mme_divisor, complete, full, figures))
    return Report(
        setup=setup,
        questions=len(questions),
        images=len({question.image for question in questions}),
        reasons=tuple(reasons),
        rows=tuple(rows),
        refused=tuple(case for case in contents.cases.values() if case.refused),
        resizing=tuple(_compare_with_resizing(contents, complete, figures)),
    )


def _build_rows(
    contents: Contents,
    divisor: float,
    cases: Sequence[Case],
    full: str,
    figures: Mapping[str, Figures],
) -> Iterator[Row]:
    benchmarks = {question.benchmark for question in contents.questions.values()}
    controls = {case.budget: case.name for case in cases if case.arm == "resized"}
    scores = {}
    for case in cases:
        computed = {name: float(f[0]) for name, f in figures[case.name].benchmarks.items()}
        totals = contents.totals.get(case.name, {})
        scores[case.name] = computed | {name: total.value for name, total in totals.items()}
    for case in cases:
        points, metrics = scores[case.name], figures[case.name].metrics
        if not benchmarks <= points.keys():
            continue
        differences = {}
        for field, other in (
            ("to_full", full),
            ("to_base", case.base),
            ("to_resized", controls.get(case.budget, "")),
        ):
            if other in figures and other != case.name:
                less = figures[other].metrics
                estimates = {
                    name: _estimate(metrics[name] - less[name])
                    for name in metrics.keys() & less.keys() & Differences.model_fields.keys()
                }
                differences[field] = Differences(**estimates)
        without = None
        if 0 < len(points.keys() - set(MMBENCH)) < len(points):
            without = aggregate(points, scores[full], divisor, MMBENCH).rounded(_DIGITS)
        single = {name: _estimate(metrics[name]) for name in metrics}
        plus, tokens = single.get("accuracy_plus"), _mean_length(contents, case)
        yield Row(
            case=case,
            benchmarks={name: round(score, _DIGITS) for name, score in points.items()},
            all=aggregate(points, scores[full], divisor).rounded(_DIGITS),
            without_mmbench=without,
            accuracy=single.get("accuracy"),
            accuracy_plus=None if plus is None else plus.value,
            prompt_tokens=None if tokens is None else round(tokens, 2),
            **differences,
        )


def _mean_length(contents: Contents, case: Case) -> float | None:
    """Mean prompt tokens of a case, where the server told any."""
    lengths = [a.prompt_tokens for a in contents.answers[case.name].values() if a.prompt_tokens]
    return sum(lengths) / len(lengths) if lengths else None


def _estimate(figure: Floats) -> Estimate | None:
    """Rounded value and interval; None for a figure without a finite value."""
    return estimate(figure).rounded(_DIGITS) if np.isfinite(figure[0]) else None


def _find_reasons(contents: Contents) -> Iterator[str]:
    """Reasons against any evaluation: failures, missing answers, no full model, no pruning."""
    cases = [case for case in contents.cases.values() if not case.refused]
    total = len(contents.questions)
    if not total:
        yield "there are no questions"
        return
    if not any(case.arm == "full" for case in cases):
        yield "the full model is not among the cases: there is nothing to compare with"
    if empty := [case.name for case in cases if not contents.answers.get(case.name)]:
        yield f"{', '.join(empty)}: no question was answered"
    for case in cases:
        answers = contents.answers.get(case.name, {})
        failures = [answer.failure for answer in answers.values() if answer.failure is not None]
        if failures:
            yield f"{case.name}: {len(failures)} of {total:,} requests failed: {failures[0]}"
        if 0 < len(answers) < total:
            missing = [q.benchmark for name, q in contents.questions.items() if name not in answers]
            where = ", ".join(dict.fromkeys(missing))
            yield f"{case.name}: {len(answers):,} of {total:,} answers; {where} is incomplete"
        lengths = contents.prompt_lengths(case)
        if lengths and all(pruned >= unpruned for pruned, unpruned in lengths):
            yield f"{case.name}: no prompt is shorter than unpruned: K keeps every token"


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
        if control is None or case.arm not in ("base", "autoprune", "found"):
            continue
        tokens, fewer = _mean_length(contents, case), _mean_length(contents, control)
        for kind, right in figures[case.name].topics.items():
            resized = figures[control.name].topics.get(kind)
            if resized is None or (kind is not None and not several):
                continue
            asked = [question for question in questions if kind in (None, question.topic)]
            images = len({question.image for question in asked})
            difference = estimate(right - resized).rounded(_DIGITS)
            yield Comparison(
                case=case.name,
                label=case.label,
                budget=case.budget,
                kind=kind,
                questions=len(asked),
                images=images,
                difference=difference,
                winner=find_winner(difference, images),
                more_tokens=round(tokens - fewer, 2) if tokens and fewer else 0.0,
                stated=case.arm != "base" or case.name not in bases,
            )


def find_winner(difference: Estimate, images: int) -> Winner:
    """Which of the two is better by an interval without 0, on enough images."""
    if images < MIN_IMAGES:
        return "too few images"
    if difference.low > 0:
        return "pruning"
    return "resizing" if difference.high < 0 else "not decided"
