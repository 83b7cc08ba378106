"""Charts of a search: its progress, and finalists by split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from offline_search.dataset import Split
from offline_search.evaluation.answers import objective_unit
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
