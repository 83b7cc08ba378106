"""The report of an evaluation, computed from its journal: rows, reasons against it, and its page.

Figures are per cent, points for MME, and natural logarithms for log-probabilities. A positive
difference is in favour of the row's own case.

A row's scores are the totals of a benchmark's own scorer if the journal has them; differences and
intervals are always computed from single answers. A case without all answers has no row.

Pruning is compared with the resize control on the same questions, at the same K, overall and by
kind: a smaller image is what an operator has without a plugin, so a state has to beat it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np

from vllm_autoprune.evaluation.journal import MME, Arm, Case, Contents, Setup
from vllm_autoprune.evaluation.scoring import Aggregates, Figures, Scoring
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Document, Section, Table
from vllm_autoprune.statistics import Estimate, Floats

_Winner = Literal["pruning", "resizing", "not decided", "too few images"]

_MIN_IMAGES = 6
"""Images below which there is no verdict: even if all of them favoured one side, a sign test would
not reach 5 %, and an interval by resampling them is too narrow."""

_DIGITS = 4
_NONE = "-"
_PRUNING_ARMS: tuple[Arm, ...] = ("found", "autoprune", "base")
"""Kinds of cases that the answer may be about, the most specific first."""

_TRIAL_IMAGES = 20
"""With fewer images than this, bootstrap intervals over images are too narrow."""

_NOTES = (
    "Acc. is the mean over benchmarks{mme}. Rel. is given by "
    "both definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over "
    "benchmarks of a score over the full model's.",
    "Differences are paired on the same questions, each with its 95 % interval ({images:,} images "
    "resampled). If an interval contains 0, the data show no difference. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K, resized "
    "the resize control: the image resized to at most K tokens, or pooled to K where the model has "
    "a fixed number of them.",
)


class _Comparison(FrozenModel):
    """A case less the resize control at the same K, in points of per cent right.

    ``kind`` is one kind of question, None for all of them.
    """

    case: str
    kind: str | None
    questions: int
    images: int
    difference: Estimate
    winner: _Winner


class _Differences(FrozenModel):
    """A case minus another one on the same questions, with 95 % intervals."""

    acc: Estimate | None = None
    accuracy: Estimate | None = None
    mme: Estimate | None = None
    logprob: Estimate | None = None


class _Row(FrozenModel):
    """Results of one case, every question of which has an answer."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    accuracy: Estimate | None
    accuracy_plus: float | None
    prompt_tokens: float | None
    """Their mean, where the server told any."""
    to_full: _Differences | None = None
    to_base: _Differences | None = None
    to_resized: _Differences | None = None


class Report(FrozenModel):
    """Report of an evaluation; ``reasons`` say why it is not valid, and are empty if it is."""

    setup: Setup
    questions: int
    images: int
    reasons: tuple[str, ...]
    rows: tuple[_Row, ...]
    refused: tuple[Case, ...]
    resizing: tuple[_Comparison, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the report."""
        return not self.reasons

    @classmethod
    def build(cls, contents: Contents, more: Iterable[str] = ()) -> Report:
        """The report of a journal that has a set-up; ``more`` are further reasons against it."""
        (setup,) = contents.setups.values()
        questions = list(contents.questions.values())
        scoring = Scoring(questions, setup.mme_divisor)
        figures = {
            name: scoring.figures(contents.answers[name])
            for name in contents.cases
            if questions and all(contents.is_answered(name, q.id) for q in questions)
        }
        reasons = [*contents.find_reasons(), *more]
        rows = list(_build_rows(contents, setup.mme_divisor, figures)) if "full" in figures else []
        right = figures["full"].metrics.get("accuracy") if rows else None
        if right is not None and right[0] == 0:  # whatever prunes can then be no worse
            reason = "full: no answer is right even with all tokens -> write the answers exactly "
            reason += "as the model does (capitals, full stop, language), and ask it for a word or "
            reasons.insert(0, f"{reason}a number")
        measured = {row.case.digest for row in rows}
        return cls(
            setup=setup,
            questions=len(questions),
            images=len({question.image for question in questions}),
            reasons=tuple(reasons),
            rows=tuple(rows),
            # The server's own state, of no K, is listed until a case has it.
            refused=tuple(
                case
                for case in contents.cases.values()
                if case.refused and (case.budget or case.digest not in measured)
            ),
            resizing=tuple(_compare_with_resizing(contents, figures)),
        )

    def format_json(self) -> str:
        """The report without the states that were sent, which the journal contains."""
        sent = {"pruning"}
        content = self.model_dump(
            mode="json",
            exclude={"rows": {"__all__": {"case": sent}}, "refused": {"__all__": sent}},
        )
        return json.dumps({"valid": self.valid, **content}, indent=1) + "\n"

    def format_markdown(self) -> str:
        """The report as a page: answer, reasons against it, pruning or resizing, all tables."""
        setup, sections = self.setup, []
        if verdicts := list(self.describe_verdicts()):
            full = next((row.accuracy for row in self.rows if row.case.arm == "full"), None)
            if full is not None:
                verdicts.insert(0, f"With all tokens, {full.value:.1f} % of the answers are right.")
            sections.append(Section("Pruning or resizing?", verdicts))
        if self.rows:
            has_mme = MME in self.rows[0].benchmarks
            mme = f", with MME divided by {setup.mme_divisor:g} first" if has_mme else ""
            tables = list(self.tables())
            if refused := [[case.title, str(case.budget), case.refused] for case in self.refused]:
                tables.append(Table("Not measured", ["method", "K", "why"], refused, "lll"))
            notes = [note.format(mme=mme, images=self.images) for note in _NOTES]
            sections.append(Section("Tables", notes, tables=tables))
        facts = [
            f"model: {setup.model}",
            f"data: {setup.data}",
            f"scored by {setup.scorer}",
            f"{self.questions:,} questions about {self.images:,} images",
        ]
        title = f"Accuracy: {setup.suite}"
        return Document(title, self.answer, "open", self.reasons, facts, sections).render_markdown()

    @property
    def answer(self) -> str:
        """What came out, of the state that was to be evaluated, at its largest budget."""
        if not self.valid:
            return "Not valid: the reasons are below, and no figure here is to be quoted."
        rows = [row for row in self.rows if row.case.arm in _PRUNING_ARMS]
        if not rows:
            return "Nothing was pruned in this evaluation: only full tokens were measured."
        arm = min((row.case.arm for row in rows), key=_PRUNING_ARMS.index)
        rows = [row for row in rows if row.case.arm == arm]
        row = max(rows, key=lambda row: row.case.budget_order)
        answer = f"{row.case.label} at K = {row.case.budget}"
        if row.accuracy is not None:
            answer += f" answers {row.accuracy.value:.1f} % of the questions right"
        if row.to_full is not None and (gap := row.to_full.accuracy) is not None:
            answer += f", {_format(gap)} points against all tokens"
            answer += "; no difference is shown" if gap.low <= 0 <= gap.high else ""
        if self.images < _TRIAL_IMAGES:
            images = f"{self.images} images, no measurement (at least {_TRIAL_IMAGES} images)"
            return f"A trial run on {images}: {answer}."
        return f"{answer}."

    def describe_verdicts(self) -> Iterator[str]:
        """One line for each state that was to be evaluated: who wins, by how much, by kind."""
        verdicts: dict[_Winner, str] = {
            "pruning": "pruning beats resizing",
            "resizing": "resizing beats pruning",
            "not decided": "not decided between pruning and resizing",
            "too few images": f"images are too few to decide (at least {_MIN_IMAGES})",
        }
        rows = {row.case.name: row for row in self.rows}
        bases = {row.case.base for row in self.rows}
        for overall in self.resizing:
            # A base policy that a state is compared with was not to be evaluated.
            if overall.kind is not None or overall.case not in rows or overall.case in bases:
                continue
            row, control = rows[overall.case], rows.get(f"resized@{rows[overall.case].case.budget}")
            more = (row.prompt_tokens or 0.0) - ((control and control.prompt_tokens) or 0.0)
            line = (
                f"{row.case.label}, K = {row.case.budget}: {verdicts[overall.winner]}, "
                f"{_format(overall.difference)} points right"
            )
            # A resized image may have a few tokens less than K.
            line += f" with {more:.1f} tokens more." if control and more >= 0.5 else "."
            kinds = [
                f"{part.kind} {_format(part.difference)}: {part.winner}"
                for part in self.resizing
                if part.case == overall.case and part.kind
            ]
            yield line + (f" By kind: {'; '.join(kinds)}." if kinds else "")

    def tables(self) -> Iterator[Table]:
        """The paper's main table, one part for each budget, each with the full model on top.

        The gain of a residual, and of each q_e, is its difference to its base policy.
        """
        to_full = [row.to_full for row in self.rows if row.to_full is not None]
        # There is no difference of Acc. if a benchmark does not score single answers.
        has_acc = any(differences.acc for differences in to_full)
        metrics = [("acc", "Acc.", 1) if has_acc else ("accuracy", "samples", 1)]
        metrics += [("logprob", "ln p", 3)] if any(row.logprob for row in to_full) else []
        benchmarks, others = list(self.rows[0].benchmarks), ("full", "base", "resized")
        head = ["method", *benchmarks, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
        head += [f"{name} less {other}" for _, name, _ in metrics for other in others]
        cases = sorted((row.case for row in self.rows), key=lambda case: case.budget_order)
        for budget in dict.fromkeys(case.budget for case in reversed(cases) if case.budget):
            rows = []
            for row in self.rows:
                if row.case.budget not in (0, budget):
                    continue
                figures: list[float | None] = [row.benchmarks[name] for name in benchmarks]
                figures += [row.all.acc, row.all.ratio_of_means, row.all.mean_of_ratios]
                cells = [_NONE if figure is None else f"{figure:.1f}" for figure in figures]
                for metric, _, digits in metrics:
                    for differences in (row.to_full, row.to_base, row.to_resized):
                        estimate = dict(differences)[metric] if differences else None
                        cells.append(_format(estimate, digits))
                rows.append([row.case.title, *cells])
            yield Table(f"K = {budget}", head, rows, "l" + "r" * (len(head) - 1))


def _build_rows(
    contents: Contents, divisor: float, figures: Mapping[str, Figures]
) -> Iterator[_Row]:
    cases = [contents.cases[name] for name in figures]
    benchmarks = {question.benchmark for question in contents.questions.values()}
    # The total of a benchmark's own scorer, or else what is computed from answers.
    scores = {}
    for name in figures:
        computed = {key: float(score[0]) for key, score in figures[name].benchmarks.items()}
        totals = contents.totals.get(name, {})
        scores[name] = computed | {key: total.value for key, total in totals.items()}
    for case in cases:
        points, metrics = scores[case.name], figures[case.name].metrics
        if not benchmarks <= points.keys():
            continue
        # Paired: all figures are of the same resamples.
        differences = {}
        for field, other in (
            ("to_full", "full"),
            ("to_base", case.base),
            ("to_resized", f"resized@{case.budget}"),
        ):
            if other in figures and other != case.name:
                less = figures[other].metrics
                names = metrics.keys() & less.keys() & _Differences.model_fields.keys()
                estimates = {name: _estimate(metrics[name] - less[name]) for name in names}
                differences[field] = _Differences(**estimates)
        plus = _estimate(metrics["accuracy_plus"]) if "accuracy_plus" in metrics else None
        answers = contents.answers[case.name].values()
        lengths = [answer.prompt_tokens for answer in answers if answer.prompt_tokens]
        yield _Row(
            case=case,
            benchmarks={name: round(score, _DIGITS) for name, score in points.items()},
            all=Aggregates.of(points, scores["full"], divisor).rounded(_DIGITS),
            accuracy=_estimate(metrics["accuracy"]) if "accuracy" in metrics else None,
            accuracy_plus=None if plus is None else plus.value,
            prompt_tokens=round(sum(lengths) / len(lengths), 2) if lengths else None,
            **differences,
        )


def _estimate(figure: Floats) -> Estimate | None:
    """Rounded value and interval; None for a figure without a finite value."""
    return Estimate.of(figure).rounded(_DIGITS) if np.isfinite(figure[0]) else None


def _compare_with_resizing(
    contents: Contents, figures: Mapping[str, Figures]
) -> Iterator[_Comparison]:
    """Each case that runs a policy and has a resize control, overall and then by kind."""
    questions = contents.questions.values()
    kinds = {question.topic for question in questions}
    for name, case in contents.cases.items():
        control = figures.get(f"resized@{case.budget}")
        if name not in figures or control is None or case.arm not in _PRUNING_ARMS:
            continue
        for kind, right in figures[name].topics.items():
            if kind not in control.topics or (kind is not None and len(kinds) == 1):
                continue
            asked = [question for question in questions if kind in (None, question.topic)]
            images = len({question.image for question in asked})
            difference = Estimate.of(right - control.topics[kind]).rounded(_DIGITS)
            winner: _Winner = "not decided"
            if images < _MIN_IMAGES:
                winner = "too few images"
            elif difference.low > 0 or difference.high < 0:
                winner = "pruning" if difference.low > 0 else "resizing"
            yield _Comparison(
                case=name,
                kind=kind,
                questions=len(asked),
                images=images,
                difference=difference,
                winner=winner,
            )


def _format(estimate: Estimate | None, digits: int = 1) -> str:
    """A difference with its interval, such as ``+5.1 (+2.0 to +8.1)``.

    What rounds to zero has no sign, so that no loss is claimed.
    """
    if estimate is None:
        return _NONE
    value, low, high = (
        f"{rounded:+.{digits}f}" if (rounded := round(figure, digits)) else f"{0:.{digits}f}"
        for figure in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low} to {high})"
