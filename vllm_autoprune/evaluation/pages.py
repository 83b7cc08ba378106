"""The page of a report: what came out, pruning against resizing, a chart over K, and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from vllm_autoprune.evaluation.journal import Arm
from vllm_autoprune.evaluation.report import MIN_IMAGES, Report, Winner
from vllm_autoprune.report import Chart, Document, Mark, Rule, Section, Series, Table, Tone
from vllm_autoprune.statistics import Estimate

_NONE = "-"
_PRUNING_ARMS: tuple[Arm, ...] = ("found", "autoprune", "base")
"""Kinds of cases that the answer may be about, the most specific first."""

_TRIAL_IMAGES = 20
"""With fewer images than this, bootstrap intervals over images are too narrow."""
_FEW_RIGHT = 50
"""Per cent right with all tokens below which the answers are probably written in another way."""
_APART = 1.02
"""Factor on K by which a series stands beside the one before, so that intervals do not overlap."""

_NOTES = (
    "Acc. is the mean over benchmarks, with MME divided by {divisor:g} first. Rel. is given by "
    "both definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over "
    "benchmarks of a score over the full model's.",
    "Differences are paired on the same questions, each with its 95 % interval ({images:,} images "
    "resampled). If an interval contains 0, the data show no difference. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K, resized "
    "the resize control: the image resized to at most K tokens, or pooled to K where the model has "
    "a fixed number of them.",
)


def build_document(report: Report) -> Document:
    """The whole page."""
    setup, answer, tone = report.setup, *_build_answer(report)
    full = next((row.accuracy for row in report.rows if row.case.arm == "full"), None)
    sections = []
    if verdicts := list(_compare_with_resizing(report)):
        if full is not None:
            right = f"With all tokens, {full.value:.1f} % of the answers are right."
            if full.value < _FEW_RIGHT:
                right += (
                    " An answer is right if the model gives exactly it: where it is not written "
                    "as the model writes it, it is wrong in every row."
                )
            verdicts.insert(0, right)
        sections.append(Section("Pruning or resizing?", verdicts))
    if series := _draw_series(report):
        budgets = sorted({row.case.budget for row in report.rows} - {0})
        chart = Chart(
            "Questions answered right",
            "visual tokens kept, K",
            "right, %",
            series,
            [Rule(full.value, f"all tokens {full.value:.1f} %")] if full is not None else [],
            x_scale="log",
            x_names={float(budget): str(budget) for budget in budgets},
        )
        text = "Bars: 95 % intervals, images resampled."
        sections.append(Section("Accuracy over K", [text], [chart]))
    if report.rows:
        notes = [note.format(divisor=setup.mme_divisor, images=report.images) for note in _NOTES]
        tables = [*_result_tables(report), *_resizing_tables(report)]
        if refused := [[case.label, str(case.budget), case.refused] for case in report.refused]:
            tables.append(Table("Cannot be served", ["method", "K", "why"], refused, "lll"))
        sections.append(Section("Tables", notes, tables=tables))
    return Document(
        title=f"Accuracy: {setup.suite}",
        answer=answer,
        tone=tone,
        warnings=report.reasons,
        facts=[
            f"model: {setup.model}",
            f"data: {setup.data}",
            f"scored by {setup.scorer}",
            f"{report.questions:,} questions about {report.images:,} images",
        ],
        sections=sections,
    )


def _build_answer(report: Report) -> tuple[str, Tone]:
    """What came out, of the state that was to be evaluated, at its largest budget."""
    if not report.valid:
        return "Not valid: the reasons are below, and no figure here is to be quoted.", "bad"
    rows = [row for row in report.rows if row.case.arm in _PRUNING_ARMS]
    if not rows:
        return "Nothing was pruned in this evaluation: only full tokens were measured.", "open"
    row = min(rows, key=lambda row: (_PRUNING_ARMS.index(row.case.arm), -row.case.budget))
    tone: Tone = "open"
    sentence = f"{row.case.label} at K = {row.case.budget}"
    if row.accuracy is not None:
        sentence += f" answers {row.accuracy.value:.1f} % of the questions right"
    if row.to_full is not None and (gap := row.to_full.accuracy) is not None:
        interval = f"95 %: {gap.low:+.1f} to {gap.high:+.1f}"
        if gap.low <= 0 <= gap.high:
            sentence += f"; no difference to all tokens is shown ({gap.value:+.1f}, {interval})"
        else:
            word, tone = ("fewer", "bad") if gap.value < 0 else ("more", "good")
            sentence += f", {abs(gap.value):.1f} points {word} than with all tokens ({interval})"
    if report.images < _TRIAL_IMAGES:
        images = f"{report.images} images, no measurement (at least {_TRIAL_IMAGES} images)"
        return f"A trial run on {images}: {sentence}.", "open"
    return f"{sentence}.", tone


def _compare_with_resizing(report: Report) -> Iterator[str]:
    """One line for each stated case: who wins overall, by how much, and for which kinds."""
    verdicts: dict[Winner, str] = {
        "pruning": "pruning beats resizing",
        "resizing": "resizing beats pruning",
        "not decided": "not decided between pruning and resizing",
    }
    for overall in report.resizing:
        if not overall.stated or overall.kind is not None:
            continue
        few = f"{overall.images} images are too few to decide (at least {MIN_IMAGES})"
        tokens = overall.more_tokens
        more = f" with {tokens:.1f} tokens more" if tokens >= 0.5 else ""
        line = (
            f"{overall.label}, K = {overall.budget}: {verdicts.get(overall.winner, few)}, "
            f"{_format(overall.difference)} points right{more}."
        )
        kinds = [row for row in report.resizing if row.case == overall.case and row.kind]
        by_winner = []
        for winner in get_args(Winner):
            cells = [f"{row.kind} {_format(row.difference)}" for row in kinds
                     if row.winner == winner]  # fmt: skip
            wins = " wins" if winner in ("pruning", "resizing") else ""
            by_winner += [f"{winner}{wins}: {', '.join(cells)}"] if cells else []
        yield line + (f" By kind: {'; '.join(by_winner)}." if by_winner else "")


def _draw_series(report: Report) -> list[Series]:
    """Per cent right over K, one line a method; none where answers are not scored one by one."""
    methods: dict[str, list[Mark]] = {}
    for row in sorted(report.rows, key=lambda row: row.case.budget):
        label, budget, right = row.case.label, row.case.budget, row.accuracy
        if budget and right is not None:
            tip = f"{label}, K = {budget}\n{right.value:.1f} % ({right.low:.1f}–{right.high:.1f})"
            marks = methods.setdefault(label, [])
            x = budget * _APART ** list(methods).index(label)
            marks.append(Mark(x, right.value, tip, right.low, right.high))
    return [Series(label, marks, colour=n) for n, (label, marks) in enumerate(methods.items())]


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


def _result_tables(report: Report) -> Iterator[Table]:
    """The paper's main table, one part for each budget, each with the full model on top.

    The gain of a residual, and of each q_e, is its difference to its base policy.
    """
    to_full = [row.to_full for row in report.rows if row.to_full is not None]
    # There is no difference of Acc. if a benchmark does not score single answers.
    has_acc = any(differences.acc for differences in to_full)
    metrics = [("acc", "Acc.", 1) if has_acc else ("accuracy", "samples", 1)]
    metrics += [("logprob", "ln p", 3)] if any(row.logprob for row in to_full) else []
    others = ["full", "base"]
    others += ["resized"] if any(row.case.arm == "resized" for row in report.rows) else []
    benchmarks = list(report.rows[0].benchmarks)
    head = ["method", *benchmarks, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    head += [f"{name} less {other}" for _, name, _ in metrics for other in others]
    for budget in sorted({row.case.budget for row in report.rows} - {0}, reverse=True):
        rows = []
        for row in report.rows:
            if row.case.budget not in (0, budget):
                continue
            figures: list[float | None] = [row.benchmarks[name] for name in benchmarks]
            figures += [row.all.acc, row.all.ratio_of_means, row.all.mean_of_ratios]
            cells = [_NONE if figure is None else f"{figure:.1f}" for figure in figures]
            for metric, _, digits in metrics:
                for other in (row.to_full, row.to_base, row.to_resized)[: len(others)]:
                    cells.append(_format(dict(other)[metric] if other else None, digits))
            rows.append([row.case.label, *cells])
        yield Table(f"K = {budget}", head, rows, "l" + "r" * (len(head) - 1))


def _resizing_tables(report: Report) -> Iterator[Table]:
    """Each case less the resize control, per cent right, of all questions and by kind."""
    for budget in sorted({row.budget for row in report.resizing}, reverse=True):
        rows: dict[str, dict[str, str]] = {}
        for row in report.resizing:
            if row.budget == budget:
                rows.setdefault(row.label, {})[row.kind or "all"] = _format(row.difference)
        kinds = list(dict.fromkeys(kind for cells in rows.values() for kind in cells))
        cells = [[label, *(row.get(kind, _NONE) for kind in kinds)] for label, row in rows.items()]
        caption = f"Less the resize control, per cent right, K = {budget}"
        yield Table(caption, ["method", *kinds], cells, "l" + "r" * len(kinds))
