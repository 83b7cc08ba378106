"""Measured rows beside the published ones of the same method, budget and backbone."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_autoprune.evaluation import published, report
from vllm_autoprune.evaluation.tables import NO_VALUE, Table, build_table


def compare_with_published(measured: report.Report, source: published.Published) -> Iterator[Table]:
    """One table for each published one of the backbone that shares a method, K and benchmark."""
    for table in source.tables:
        if table.backbone != measured.setup.backbone:
            continue
        pairs = [(row, match) for row in measured.rows if (match := _published_row(table, row))]
        shared = [name for name in table.benchmarks if pairs and name in pairs[0][0].benchmarks]
        if shared:
            head = ["method", "K", *shared, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
            rows = [_cells(table, shared, ours, theirs) for ours, theirs in pairs]
            yield build_table(f"Ours / published, {table.table}, {table.backbone}", head, rows)


def _published_row(table: published.Table, ours: report.Row) -> published.Row | None:
    """The published row of the same method and budget, if there is one."""
    case = ours.case
    names = {"full": "full", "autoprune": "AutoPrune", "base": case.label}
    if case.arm not in names:
        return None
    method = _normalise(names[case.arm])
    for row in table.rows:
        same_budget = case.arm == "full" or row.tokens == case.budget
        if _normalise(row.method) == method and same_budget:
            return row
    return None


def _normalise(name: str) -> str:
    return "".join(c for c in name.lower().replace("+", "plus") if c.isalnum())


def _cells(
    table: published.Table, shared: list[str], ours: report.Row, row: published.Row
) -> list[str]:
    scores = table.scores(row)
    whole = len(shared) == len(table.benchmarks) == len(ours.benchmarks)
    rel = f"{row.rel:.1f}"
    cells = [row.method, str(row.tokens)]
    cells += [f"{ours.benchmarks[name]:.1f} / {scores[name]:.1f}" for name in shared]
    # Means over different benchmarks cannot be compared.
    cells.append(f"{ours.all.acc:.1f} / {row.acc if whole else NO_VALUE}")
    for value, kind in (
        (ours.all.ratio_of_means, "ratio of means"),
        (ours.all.mean_of_ratios, "mean of ratios"),
    ):
        follows = whole and row.rel_follows in (kind, "both")
        measured = NO_VALUE if value is None else f"{value:.1f}"
        cells.append(f"{measured} / {rel if follows else NO_VALUE}")
    return cells
