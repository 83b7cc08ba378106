"""Our rows beside the published ones of the same method, budget and backbone.

Knows nothing about how either was measured, and so cannot say why they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accuracy.published import Published, Row
from benchmarks.accuracy.published import Table as Printed
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.report import Row as Ours
from benchmarks.accuracy.tables import NONE, Table


def beside(report: Report, source: Published) -> Iterator[Table]:
    """One table for each published one of the backbone that shares a method, K and benchmark."""
    for printed in source.tables:
        if printed.backbone != report.opened.backbone:
            continue
        pairs = [(row, found) for row in report.rows if (found := _printed(printed, row))]
        shared = [name for name in printed.benchmarks if pairs and name in pairs[0][0].benchmarks]
        if shared:
            head = ["method", "K", *shared, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
            rows = [_cells(printed, shared, ours, row) for ours, row in pairs]
            title = f"Ours / published, {printed.table}, {printed.backbone}"
            yield Table(title, head, rows)


def _printed(printed: Printed, ours: Ours) -> Row | None:
    case = ours.case
    names = {"full": "full", "autoprune": "AutoPrune", "base": case.label}
    if case.arm not in names:
        return None
    wanted = _plain(names[case.arm])
    for row in printed.rows:
        same_budget = case.arm == "full" or row.tokens == case.budget
        if _plain(row.method) == wanted and same_budget:
            return row
    return None


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("+", "plus") if c.isalnum())


def _cells(printed: Printed, shared: list[str], ours: Ours, row: Row) -> list[str]:
    scores = printed.scores(row)
    whole = len(shared) == len(printed.benchmarks) == len(ours.benchmarks)
    rel = f"{row.rel:.1f}"
    cells = [row.method, str(row.tokens)]
    cells += [f"{ours.benchmarks[name]:.1f} / {scores[name]:.1f}" for name in shared]
    # A mean over other benchmarks is another figure.
    cells.append(f"{ours.all.acc:.1f} / {row.acc if whole else NONE}")
    for value, kind in (
        (ours.all.ratio_of_means, "ratio of means"),
        (ours.all.mean_of_ratios, "mean of ratios"),
    ):
        follows = whole and row.rel_follows in (kind, "both")
        shown = NONE if value is None else f"{value:.1f}"
        cells.append(f"{shown} / {rel if follows else NONE}")
    return cells
