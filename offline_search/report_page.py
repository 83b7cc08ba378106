"""HTML report of a search: who won and why, its progress, and every candidate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from offline_search.dataset import Split
from offline_search.history import describe_objective, objective_unit
from offline_search.ledger import WinnerRecord
from offline_search.report import (
    CandidateRow,
    SearchReport,
    cause_table,
    count_candidates,
    describe_cost,
    explain_winner,
    format_percent,
    result_table,
)
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
        [*explain_winner(report, winner), _objective_note(report)],
        tables=[_finalists(report, winner)],
    )
    text = (
        "Examples that no candidate was chosen on. accuracy+: both answers of a pair right, or all "
        "about an image. MME total: accuracy and accuracy+ in per cent, added over all categories."
    )
    yield Section("Result on the test split", [text], tables=[result_table(winner)])


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
                Cell(name, "winner" if chosen else "", _link(name), "good" if chosen else ""),
                _value_cell(report, scores.get(name)),
                _estimate_cell(report, winner.confirmed[name].objective),
                _value_cell(report, estimate),
                _estimate_cell(report, winner.test.objective) if chosen else unknown,
                _estimate_cell(report, winner.confirmed[name].gain),
                _estimate_cell(report, winner.test.gain) if chosen else unknown,
            ]
        )
    none = Cell("–")
    search, validation = (
        _value_cell(report, value) for value in (report.base_objective, winner.base_validation)
    )
    test = _estimate_cell(report, winner.base.objective)
    rows.append(["base policy", search, validation, none, test, none, none])
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
            count_candidates(report),
        ]
    yield Section("Progress", texts, charts)


def _table_sections(report: SearchReport) -> Iterator[Section]:
    if report.causes:
        table = cause_table(report)
        yield Section("Why candidates were not evaluated", tables=[table], folded=True)
    yield Section("Cost", list(describe_cost(report)), folded=True)


def _candidate_section(report: SearchReport) -> Section:
    others = [row for row in report.rows if row not in report.ranked]
    entries = [_candidate(report, row) for row in (*report.ranked, *others)]
    text = "Best on the search split first, then the others in order of proposal."
    return Section("Candidates", [text], entries=entries, folded=True)


def _candidate(report: SearchReport, row: CandidateRow) -> Details:
    changes = [
        f"{change.where} {change.kind}: {json.dumps(change.before)} → {json.dumps(change.after)}"
        for change in row.changes
    ]
    hypothesis = row.proposal.hypothesis
    reasons = [] if hypothesis is None else [f"{hypothesis.purpose}: {hypothesis.text}"]
    against = [f"Against {', '.join(row.proposal.parents)}:"] if changes else []
    return Details(
        _describe_result(report, row),
        [*reasons, *row.proposal.problems, *against],
        changes,
        json.dumps(row.components, indent=1) if row.components else "",
        name=f"candidate-{row.name}",
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


_SPLITS: Mapping[Split, float] = {"search": 1.0, "validation": 2.0, "test": 3.0}


def draw_charts(report: SearchReport) -> list[Chart]:
    """The progress, once something is measured, and the finalists of a search that has ended."""
    measured = [row for row in report.rows if row.result.objective is not None]
    if not measured:
        return []
    label = f"objective, {objective_unit(report.settings)}"
    charts = [_progress(report, measured, label)]
    if report.winner is not None:
        charts.append(_splits(report, report.winner, label))
    return charts


def _progress(report: SearchReport, measured: Sequence[CandidateRow], label: str) -> Chart:
    """Every candidate at the answers spent until it was measured, and the best so far."""

    def marks(complete: bool) -> list[Mark]:
        rows = [row for row in measured if (row.objective is not None) == complete]
        return [
            Mark(row.spent, value, tip(row, value), hollow=not complete, link=_link(row.name))
            for row in rows
            if (value := row.result.objective) is not None
        ]

    def tip(row: CandidateRow, value: float) -> str:
        status = "" if row.objective is not None else f"\n{row.status}"
        return f"{row.name} by {row.origin}\nobjective {report.format_objective(value)}{status}"

    best, base = report.curve(), report.base_objective
    if best:
        best.append((max(row.spent for row in measured), best[-1][1]))
    series = [
        Series("measured", marks(True), line="none"),
        Series("stopped early", marks(False), line="none", colour=1),
        Series("best so far", path=best, line="steps", colour=2),
    ]
    drawn = [each for each in series if each.marks or each.path]
    rules = [] if base is None else [Rule(base, f"base policy {report.format_objective(base)}")]
    spent = "answers of the served model, search split"
    return Chart("Objective over answers spent", spent, label, drawn, rules, x_zero=True)


def _link(name: str) -> str:
    return f"#candidate-{name}"


def _splits(report: SearchReport, winner: WinnerRecord, label: str) -> Chart:
    """Search, validation and test of the finalists and of the base policy, one line each."""
    scores = {row.name: row.result.objective for row in report.rows}

    def mark(name: str, split: Split, value: float, interval: Estimate | None = None) -> Mark:
        tip = f"{name}, {split} split\nobjective {report.format_objective(value)}"
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        return Mark(_SPLITS[split], value, tip, low, high)

    series = []
    for number, (name, validation) in enumerate(winner.confirmed.items()):
        chosen = name == winner.winner
        objective = validation.objective
        marks = [mark(name, "validation", objective.value, objective)]
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
        label,
        series,
        x_names={place: split for split, place in _SPLITS.items()},
        side_by_side=True,
    )
