"""The tables of an evaluation, as cells: main rows by budget, gains, components, exchange quota.

Knows nothing about Markdown or LaTeX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.records import MME
from benchmarks.accuracy.report import Gaps, Report, Row
from offline_search.records import Measured

NONE = "-"


@dataclass(frozen=True)
class Table:
    """Cells with a title; the first ``left`` columns are text, the others figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def tables(report: Report) -> Iterator[Table]:
    """Every table that the report has rows for."""
    yield from _main(report)
    yield from _gains(report)
    yield from _components(report)
    yield from _quotas(report)
    if report.refused:
        rows = [[case.label, str(case.budget), case.refused] for case in report.refused]
        yield Table("Cannot be served", ["method", "K", "why"], rows, left=3)


def _main(report: Report) -> Iterator[Table]:
    """As the paper's main table, one part for each budget, full tokens on top of each."""
    shown = [row for row in report.rows if row.case.arm in ("full", "random", "base", "autoprune")]
    full = [row for row in shown if row.case.arm == "full"]
    for budget in _budgets(shown):
        rows = [*full, *(row for row in shown if row.case.budget == budget)]
        yield Table(
            f"K = {budget}",
            _head(report),
            [_cells(report, row) for row in rows],
        )


def _head(report: Report) -> list[str]:
    names = list(report.rows[0].benchmarks)
    head = ["method", *names, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    if report.rows[0].without_mmbench is not None:
        head += ["Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB"]
    what = "Acc." if _has(report, lambda gaps: gaps.acc) else "samples"
    head += [f"{what} less full", f"{what} less base"]
    if _has(report, lambda gaps: gaps.logprob):
        head += ["ln p less full", "ln p less base"]
    return head


def _cells(report: Report, row: Row) -> list[str]:
    cells = [row.case.label, *(f"{row.benchmarks[name]:.1f}" for name in report.rows[0].benchmarks)]
    parts = [row.all] if row.without_mmbench is None else [row.all, row.without_mmbench]
    for part in parts:
        cells += [f"{part.acc:.1f}", _figure(part.ratio_of_means), _figure(part.mean_of_ratios)]
    first: Callable[[Gaps], Measured | None] = (
        (lambda gaps: gaps.acc)
        if _has(report, lambda gaps: gaps.acc)
        else (lambda gaps: gaps.accuracy)
    )
    cells += [_gap(row.to_full, first), _gap(row.to_base, first)]
    if _has(report, lambda gaps: gaps.logprob):
        cells += [
            _gap(row.to_full, lambda gaps: gaps.logprob, 3),
            _gap(row.to_base, lambda gaps: gaps.logprob, 3),
        ]
    return cells


def _gains(report: Report) -> Iterator[Table]:
    """What the residual adds to each base policy, as the paper's table over base policies."""
    rows = [row for row in report.rows if row.case.arm == "autoprune" and row.to_base is not None]
    budgets = _budgets(rows)
    labels = list(dict.fromkeys(row.case.label for row in rows))
    if len(rows) < 2:
        return
    head = ["base policy", *(f"K = {budget}" for budget in budgets)]
    kinds: tuple[tuple[str, Callable[[Gaps], Measured | None], int], ...] = (
        ("AutoPrune less strategy only, Acc.", lambda gaps: gaps.acc or gaps.accuracy, 1),
        ("AutoPrune less strategy only, ln p of the reference answer", lambda g: g.logprob, 3),
    )
    for title, pick, digits in kinds:
        if not _has(report, pick):
            continue
        cells = []
        for label in labels:
            own = {row.case.budget: row for row in rows if row.case.label == label}
            gaps = [own[budget].to_base if budget in own else None for budget in budgets]
            cells.append([label, *(_gap(gap, pick, digits) for gap in gaps)])
        yield Table(title, head, cells)


def _components(report: Report) -> Iterator[Table]:
    """The paper's ablation of components; both differences are of MME points."""
    ablated = [row for row in report.rows if row.case.arm == "component"]
    rows = []
    for budget in _budgets(ablated):
        own = [row for row in ablated if row.case.budget == budget]
        base, whole = report.of(own[0].case.base), _residual_of(report, own[0])
        for row in (base, *own, whole):
            if row is not None:
                rows.append([str(budget), row.case.label, *_ablation(row, whole)])
    if rows:
        head = ["K", "method", "MME", "less base", "less AutoPrune", "Acc. less base",
                "ln p less base"]  # fmt: skip
        yield Table("Ablation of components", head, rows, left=2)


def _ablation(row: Row, whole: Row | None) -> list[str]:
    mme = row.benchmarks.get(MME)
    over = None if whole is None or whole is row else whole.benchmarks.get(MME)
    return [
        _figure(mme),
        _gap(row.to_base, lambda gaps: gaps.mme),
        NONE if mme is None or over is None else f"{mme - over:+.1f}",
        _gap(row.to_base, lambda gaps: gaps.acc),
        _gap(row.to_base, lambda gaps: gaps.logprob, 3),
    ]


def _quotas(report: Report) -> Iterator[Table]:
    """The paper's sweep of q_e; differences are to the base policy, which exchanges nothing."""
    swept = [row for row in report.rows if row.case.arm == "quota"]
    rows = []
    for budget in _budgets(swept):
        own = [row for row in swept if row.case.budget == budget]
        whole = _residual_of(report, own[0])
        for row in sorted(
            [*own, *([whole] if whole is not None else [])], key=lambda row: row.case.quota or 0
        ):
            quota = row.case.quota or 0
            rows.append([str(budget), str(quota), str(max(budget - quota, 0)),
                         _figure(row.benchmarks.get(MME)),
                         _gap(row.to_base, lambda gaps: gaps.mme),
                         _gap(row.to_base, lambda gaps: gaps.acc),
                         _gap(row.to_base, lambda gaps: gaps.logprob, 3)])  # fmt: skip
    if rows:
        head = ["K", "q_e", "K - q_e", "MME", "less base", "Acc. less base", "ln p less base"]
        yield Table("Sweep of the exchange quota", head, rows, left=0)


def _residual_of(report: Report, row: Row) -> Row | None:
    """AutoPrune on the same base policy at the same budget."""
    return next(
        (
            other
            for other in report.rows
            if other.case.arm == "autoprune" and other.case.base == row.case.base
        ),
        None,
    )


def _budgets(rows: Sequence[Row]) -> list[int]:
    return sorted({row.case.budget for row in rows if row.case.budget}, reverse=True)


def _has(report: Report, pick: Callable[[Gaps], Measured | None]) -> bool:
    return any(row.to_full is not None and pick(row.to_full) is not None for row in report.rows)


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _gap(gaps: Gaps | None, pick: Callable[[Gaps], Measured | None], digits: int = 1) -> str:
    found = None if gaps is None else pick(gaps)
    if found is None:
        return NONE
    value, low, high = (f"{x:+.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"
