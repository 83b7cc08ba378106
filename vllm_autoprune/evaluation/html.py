"""The HTML page of an evaluation: the answer in one sentence, a chart over K, all tables."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_autoprune.evaluation.pages import all_tables, describe_notes, format_trial
from vllm_autoprune.evaluation.report import Report, Row
from vllm_autoprune.evaluation.resizing import format_verdicts
from vllm_autoprune.report import (
    Chart,
    Document,
    Mark,
    Rule,
    Section,
    Series,
    Tone,
    render_document,
)

_PRUNING_ARMS = ("found", "autoprune", "base")
"""Kinds of cases that the answer may be about, the most specific first."""


def as_html(report: Report) -> str:
    """The whole page."""
    answer, tone = _answer(report)
    setup = report.setup
    trial = format_trial(report)
    return render_document(
        Document(
            title=f"Accuracy: {setup.suite}",
            answer=answer,
            tone=tone,
            warnings=[*report.reasons, *([trial] if trial and report.valid else [])],
            facts=[
                f"model: {setup.model}",
                f"data: {setup.data}",
                f"scored by {setup.scorer}",
                f"{report.questions:,} questions about {report.images:,} images",
            ],
            sections=list(_sections(report)),
        )
    )


def _answer(report: Report) -> tuple[str, Tone]:
    if not report.valid:
        return "Not valid: the reasons are below, and no figure here is to be quoted.", "bad"
    row = _main_row(report)
    if row is None or row.to_full is None:
        return "Nothing was pruned in this evaluation: only full tokens were measured.", "open"
    difference = row.to_full.accuracy or row.to_full.acc
    shown = row.accuracy or None
    sentence = f"{row.case.label} at K = {row.case.budget}"
    if shown is not None:
        sentence += f" answers {shown.value:.1f} % of the questions right"
    tone: Tone = "open"
    if difference is not None:
        ends = f"95 %: {difference.low:+.1f} to {difference.high:+.1f}"
        if difference.low <= 0 <= difference.high:
            sentence += f"; no difference to all tokens is shown ({difference.value:+.1f}, {ends})"
        else:
            word = "fewer" if difference.value < 0 else "more"
            sentence += f", {abs(difference.value):.1f} points {word} than with all tokens ({ends})"
        tone = "bad" if difference.high < 0 else "good" if difference.low > 0 else "open"
    if report.images and format_trial(report):
        return f"A trial run on {report.images} images, no measurement: {sentence}.", "open"
    return f"{sentence}.", tone


def _main_row(report: Report) -> Row | None:
    """The state that was to be evaluated, at its largest budget."""
    for arm in _PRUNING_ARMS:
        rows = [row for row in report.rows if row.case.arm == arm]
        if rows:
            return max(rows, key=lambda row: row.case.budget)
    return None


def _sections(report: Report) -> Iterator[Section]:
    if verdicts := list(format_verdicts(report.resizing)):
        yield Section("Pruning or resizing?", verdicts)
    chart = _draw_budgets(report)
    if chart is not None:
        text = "Bars: 95 % intervals, images resampled."
        yield Section("Accuracy over K", [text], [chart])
    if report.rows:
        tables = list(all_tables(report))
        yield Section("Tables", list(describe_notes(report)), tables=tables)


def _draw_budgets(report: Report) -> Chart | None:
    """Per cent right over K, one line a method; None where answers are not scored one by one."""
    pruned = [row for row in report.rows if row.case.arm != "full" and row.accuracy is not None]
    if not pruned:
        return None
    series = []
    for colour, label in enumerate(dict.fromkeys(row.case.label for row in pruned)):
        own = sorted((r for r in pruned if r.case.label == label), key=lambda r: r.case.budget)
        series.append(Series(label, [_mark(row) for row in own], colour=colour))
    full = next((row for row in report.rows if row.case.arm == "full" and row.accuracy), None)
    rules = []
    if full is not None and full.accuracy is not None:
        rules = [Rule(full.accuracy.value, f"all tokens {full.accuracy.value:.1f} %")]
    return Chart(
        "Questions answered right",
        "visual tokens kept, K",
        "right, %",
        series,
        rules,
        x_scale="log",
        y_most=100.0,
        x_names={float(row.case.budget): str(row.case.budget) for row in pruned},
        side_by_side=True,
    )


def _mark(row: Row) -> Mark:
    assert row.accuracy is not None
    own = row.accuracy
    tip = (
        f"{row.case.label}, K = {row.case.budget}\n{own.value:.1f} % ({own.low:.1f}–{own.high:.1f})"
    )
    if row.prompt_tokens is not None:
        tip += f"\n{row.prompt_tokens:.0f} prompt tokens"
    return Mark(row.case.budget, own.value, tip, own.low, own.high)
