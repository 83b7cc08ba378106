"""HTML report of a search: who won and why, its progress, and every candidate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from offline_search import report as markdown
from offline_search.dataset import Split
from offline_search.history import describe_objective, objective_unit
from offline_search.ledger import WinnerRecord
from offline_search.report import CandidateRow, SearchReport, format_percent
from vllm_autoprune.report import (
    Cell,
    Chart,
    Details,
    Document,
    Mark,
    Row,
    Rule,
    Section,
    Series,
    Table,
    Tone,
    render_document,
)
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.transfer import Change


def _objective_note(report: SearchReport) -> str:
    return (
        f"Objective: {describe_objective(report.settings)}; 0 is as good as unpruned. "
        "Intervals: 95 %, images resampled."
    )


def as_html(report: SearchReport) -> str:
    """The whole page."""
    settings, winner = report.settings, report.winner
    answer, tone = _answer(report)
    document = Document(
        title=f"Search for a state: {settings.strategy} on {settings.base_policy}, "
        f"K = {settings.source_budget}",
        answer=answer,
        tone=tone,
        facts=_list_facts(report),
        sections=[
            *([] if winner is None else _winner_sections(report, winner)),
            *_progress_sections(report),
            *_table_sections(report),
            *([_candidate_section(report)] if report.rows else []),
        ],
    )
    return render_document(document)


def _answer(report: SearchReport) -> tuple[str, Tone]:
    winner, base = report.winner, report.settings.base_policy
    if winner is None:
        best = report.ranked[0] if report.ranked else None
        leader = f"; {best.name} leads on the search split" if best else ""
        return f"The search has not ended{leader}.", "open"
    gain = winner.test.gain
    tone: Tone = "good" if gain.low > 0 else "bad" if gain.high < 0 else "open"
    verdict = {
        "good": f"is better than {base} alone",
        "bad": f"is worse than {base} alone",
        "open": f"shows no difference to {base} alone",
    }[tone]
    value, low, high = map(report.format_objective, (gain.value, gain.low, gain.high))
    return (
        f"Candidate {winner.winner} won and {verdict} on the test split: objective "
        f"{value} {objective_unit(report.settings)} ({low} to {high}), accuracy "
        f"{format_percent(winner.test.accuracy)} % against "
        f"{format_percent(winner.base.accuracy)} %.",
        tone,
    )


def _list_facts(report: SearchReport) -> list[str]:
    settings = report.settings
    facts = [f"measured on {settings.evaluator}"] if settings.evaluator else []
    facts += [f"proposer: {settings.proposer or 'none'}", f"seed {settings.seed}"]
    facts.append(f"{len(report.rows)} candidates")
    if report.winner is not None:
        facts.append(f"{report.winner.test.examples} test examples")
    return facts


def _winner_sections(report: SearchReport, winner: WinnerRecord) -> Iterator[Section]:
    yield Section(
        "Why this candidate",
        [*markdown.explain_winner(report, winner), _objective_note(report)],
        tables=[_finalists(report, winner)],
    )
    rows = markdown.result_rows(winner.test, winner.base)
    table = Table("", markdown.RESULT_HEAD, rows)
    text = (
        "Examples that no candidate was chosen on. accuracy+: both answers of a pair right, or all "
        "about an image. MME total: accuracy and accuracy+ in per cent, added over all categories."
    )
    yield Section("Result on the test split", [text], tables=[table])


def _finalists(report: SearchReport, winner: WinnerRecord) -> Table:
    """Search, validation and test of the finalists and of the base policy, side by side."""
    scores = {row.name: row.result.objective for row in report.rows}
    rows: list[Row] = []
    unknown = Cell("not measured")
    for name in sorted(winner.confirmed, key=lambda each: -winner.estimates.get(each, 0.0)):
        chosen = name == winner.winner
        estimate = winner.estimates.get(name)
        rows.append(
            [
                Cell(
                    name, "winner" if chosen else "", f"#{anchor(name)}", "good" if chosen else ""
                ),
                _value_cell(report, scores.get(name)),
                _estimate_cell(report, winner.confirmed[name].objective),
                _value_cell(report, estimate),
                _estimate_cell(report, winner.test.objective) if chosen else unknown,
                _estimate_cell(report, winner.confirmed[name].gain),
                _estimate_cell(report, winner.test.gain) if chosen else unknown,
            ]
        )
    none = Cell("–")
    rows.append(
        [
            "base policy",
            _value_cell(report, report.base_objective),
            _value_cell(report, winner.base_validation),
            none,
            _estimate_cell(report, winner.base.objective),
            none,
            none,
        ]
    )
    head = ["candidate", "search", "validation", "search and validation", "test",
            "gain, validation", "gain, test"]  # fmt: skip
    return Table("", head, rows)


def _value_cell(report: SearchReport, value: float | None) -> Cell:
    return Cell("unknown" if value is None else report.format_objective(value))


def _estimate_cell(report: SearchReport, estimate: Estimate) -> Cell:
    value, low, high = map(report.format_objective, (estimate.value, estimate.low, estimate.high))
    return Cell(value, f"{low} to {high}")


def _progress_sections(report: SearchReport) -> Iterator[Section]:
    charts = draw_charts(report)
    texts = ["Nothing has been measured yet."]
    if charts:
        texts = [] if report.winner is not None else [_objective_note(report)]
        texts += [
            "Hollow: stopped early, measured on a part of the search split. Click a point for the "
            "candidate.",
            markdown.count_candidates(report),
        ]
    yield Section("Progress", texts, charts)


def _table_sections(report: SearchReport) -> Iterator[Section]:
    if report.common_atoms:
        head = ["atom", "of the best five, %", "of all, %"]
        table = Table("", head, markdown.common_atom_rows(report))
        yield Section("What the best five have in common", tables=[table], folded=True)
    if report.causes:
        table = Table("", ["cause", "times"], markdown.cause_rows(report))
        yield Section("Why candidates were not evaluated", tables=[table], folded=True)
    yield Section("Cost", list(markdown.describe_cost(report)), folded=True)


def _candidate_section(report: SearchReport) -> Section:
    others = [row for row in report.rows if row not in report.ranked]
    entries = [_candidate(report, row) for row in (*report.ranked, *others)]
    text = "Best on the search split first, then the others in order of proposal."
    return Section("Candidates", [text], entries=entries, folded=True)


def _candidate(report: SearchReport, row: CandidateRow) -> Details:
    changes = [_describe_change(change) for change in row.changes]
    hypothesis = row.proposal.hypothesis
    reasons = [] if hypothesis is None else [f"{hypothesis.purpose}: {hypothesis.text}"]
    against = [f"Against {', '.join(row.proposal.parents)}:"] if changes else []
    return Details(
        _describe_result(report, row),
        [*reasons, *row.proposal.problems, *against],
        changes,
        json.dumps(row.components, indent=1) if row.components else "",
        name=anchor(row.name),
    )


def _describe_result(report: SearchReport, row: CandidateRow) -> str:
    """One line on a candidate: its origin and its result."""
    result = row.result
    if result.same_as:
        outcome = f"keeps the same tokens as {result.same_as}"
    elif result.objective is None:
        outcome = f"{row.status} {result.reason}".strip()
    else:
        scores = (("", result.accuracy), ("+", result.accuracy_plus))
        shares = [f"accuracy{sign} {format_percent(v)} %" for sign, v in scores if v is not None]
        objective = report.format_objective(result.objective)
        figures = [f"objective {objective}", *shares, f"{result.examples} answers"]
        outcome = ", ".join(figures)
        if result.status != "evaluated":
            outcome = f"{row.status} after {outcome} {result.reason}".strip()
    return f"{row.name} by {row.origin}: {outcome}"


def _describe_change(change: Change) -> str:
    before, after = json.dumps(change.before), json.dumps(change.after)
    return f"{change.where} {change.kind}: {before} → {after}"


_SPREAD = 3.0
"""A chart of the better half is added where the worse half takes this many times its height."""
_SPLITS: Mapping[Split, float] = {"search": 1.0, "validation": 2.0, "test": 3.0}


def draw_charts(report: SearchReport) -> list[Chart]:
    """All charts for which there are measurements."""
    measured = [row for row in report.rows if row.result.objective is not None]
    if not measured:
        return []
    charts = [_progress("Objective over answers spent", measured, report)]
    half = _better_half(measured)
    if half:
        charts.append(_progress("The same, better half of the candidates", half, report))
    if report.winner is not None:
        charts.append(_splits(report, report.winner))
    return charts


def anchor(name: str) -> str:
    """The page's name for a candidate."""
    return f"candidate-{name}"


def _progress(title: str, rows: Sequence[CandidateRow], report: SearchReport) -> Chart:
    """Every candidate at the answers spent until it was measured, and the best so far."""
    lowest = min(row.result.objective or 0.0 for row in rows)
    best = [(spent, value) for spent, value in report.curve() if value >= lowest]
    if best:
        best.append((max(row.spent for row in rows), best[-1][1]))
    complete = [row for row in rows if row.result.status == "evaluated"]
    partial = [row for row in rows if row.result.status != "evaluated"]
    series = [
        Series("measured", [_mark(report, row, row.spent) for row in complete], line="none"),
        Series(
            "stopped early",
            [_mark(report, row, row.spent, hollow=True) for row in partial],
            line="none",
            colour=1,
        ),
        Series("best so far", path=best, line="steps", colour=2),
    ]
    return Chart(
        title,
        "answers of the served model, search split",
        _objective_label(report),
        [one for one in series if one.marks or one.path],
        _base_rule(report, rows),
        x_zero=True,
    )


def _splits(report: SearchReport, winner: WinnerRecord) -> Chart:
    """Search, validation and test of the finalists and of the base policy, one line each."""
    scores = {row.name: row.result.objective for row in report.rows}

    def mark(name: str, split: Split, value: float, interval: Estimate | None = None) -> Mark:
        tip = f"{name}, {split} split\nobjective {report.format_objective(value)}"
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        return Mark(_SPLITS[split], value, tip, low, high)

    series = []
    for number, (name, validation) in enumerate(winner.confirmed.items()):
        chosen = name == winner.winner
        own = validation.objective
        marks = [mark(name, "validation", own.value, own)]
        if (score := scores.get(name)) is not None:
            marks.insert(0, mark(name, "search", score))
        if chosen:
            marks.append(mark(name, "test", winner.test.objective.value, winner.test.objective))
        title = f"{name} (winner)" if chosen else name
        series.append(Series(title, marks, dashed=not chosen, colour=number))
    base = "base policy"
    marks = [
        mark(base, "validation", winner.base_validation),
        mark(base, "test", winner.base.objective.value, winner.base.objective),
    ]
    if report.base_objective is not None:
        marks.insert(0, mark(base, "search", report.base_objective))
    series.append(Series(base, marks, dashed=True, colour=5))
    return Chart(
        "Finalists on each split",
        "split",
        _objective_label(report),
        series,
        x_names={place: split for split, place in _SPLITS.items()},
        side_by_side=True,
    )


def _objective_label(report: SearchReport) -> str:
    return f"objective, {objective_unit(report.settings)}"


def _mark(report: SearchReport, row: CandidateRow, x: float, *, hollow: bool = False) -> Mark:
    """A candidate's point, with its name, origin, objective and status as a tooltip."""
    objective = row.result.objective
    assert objective is not None
    tip = f"{row.name} by {row.origin}\nobjective {report.format_objective(objective)}"
    if row.result.status != "evaluated":
        tip += f"\n{row.status}"
    return Mark(x, objective, tip, hollow=hollow, link=f"#{anchor(row.name)}")


def _base_rule(report: SearchReport, rows: Sequence[CandidateRow]) -> list[Rule]:
    """The base policy's objective, unless it lies below all that the chart shows."""
    lowest = min(row.result.objective or 0.0 for row in rows)
    base = report.base_objective
    if base is None or (base < lowest and len(rows) < len(report.rows)):
        return []
    return [Rule(base, f"base policy {report.format_objective(base)}")]


def _better_half(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """Candidates above the median, where the others would flatten a chart of all; else none."""
    values = [row.result.objective or 0.0 for row in rows]
    middle = median(values)
    if middle - min(values) <= _SPREAD * (max(values) - middle):
        return []
    return [row for row in rows if (row.result.objective or 0.0) >= middle]
