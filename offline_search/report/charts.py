"""Charts of a search: its progress, candidates with their parents, and finalists by split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from offline_search.dataset import Split
from offline_search.evaluation.objectives import objective_unit
from offline_search.ledger.records import WinnerRecord
from offline_search.report.search_report import CandidateRow, SearchReport
from vllm_autoprune.pages.charts import Chart, Mark, Rule, Series
from vllm_autoprune.statistics import Estimate

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
    charts.append(_parents(half or measured, report, better_half=bool(half)))
    if report.winner is not None:
        charts.append(_splits(report, report.winner))
    return charts


def anchor(name: str) -> str:
    """The page's name for a candidate."""
    return f"candidate-{name}"


def describe_candidate(row: CandidateRow, report: SearchReport) -> str:
    """Lines for a tooltip: name and origin, objective, status."""
    value = row.result.objective
    objective = "" if value is None else f"\nobjective {report.format_objective(value)}"
    status = "" if row.result.status == "evaluated" else f"\n{row.status}"
    return f"{row.name} by {row.origin}{objective}{status}"


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


def _parents(rows: Sequence[CandidateRow], report: SearchReport, *, better_half: bool) -> Chart:
    """Objective over round by origin, each candidate joined with its first parent."""
    places = {
        row.name: (float(row.proposal.round), row.result.objective)
        for row in rows
        if row.result.objective is not None
    }
    edges = []
    for row in rows:
        parent = places.get(row.proposal.parents[0]) if row.proposal.parents else None
        if parent is not None and row.name in places:
            x, y = places[row.name]
            edges.append((parent[0], parent[1], x, y))
    origins = list(dict.fromkeys(row.origin for row in rows))
    rounds = sorted({row.proposal.round for row in rows})
    series = [
        Series(
            origin,
            [
                _mark(report, row, row.proposal.round, hollow=row.result.status != "evaluated")
                for row in rows
                if row.origin == origin
            ],
            line="none",
            colour=colour,
        )
        for colour, origin in enumerate(origins)
    ]
    which = ", better half" if better_half else ""
    return Chart(
        f"Candidates and their parents{which}",
        "round",
        _objective_label(report),
        series,
        _base_rule(report, rows),
        edges=edges,
        x_names={float(number): str(number) for number in rounds} if len(rounds) < 10 else {},
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
    assert row.result.objective is not None
    link = f"#{anchor(row.name)}"
    return Mark(x, row.result.objective, describe_candidate(row, report), hollow=hollow, link=link)


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
