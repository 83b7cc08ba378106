"""The tables of an evaluation, as cells: main rows by budget, gains, components, exchange quota.

Knows nothing about Markdown or LaTeX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.records import MME, Arm
from benchmarks.accuracy.report import Gaps, Report, Row
from offline_search.ledger.records import IntervalEstimate

NONE = "-"


@dataclass(frozen=True)
class Kind:
    """One kind of difference: how columns name it, where it is, how many decimals it has."""

    name: str
    of: Callable[[Gaps], IntervalEstimate | None]
    digits: int = 1

    def cell(self, gaps: Gaps | None) -> str:
        """Value and interval."""
        found = None if gaps is None else self.of(gaps)
        if found is None:
            return NONE
        value, low, high = (self._signed(x) for x in (found.value, found.low, found.high))
        return f"{value} ({low} to {high})"

    def _signed(self, value: float) -> str:
        """With its sign, but a zero has none: what is smaller than the last digit is no loss."""
        rounded = round(value, self.digits)
        return f"{rounded:+.{self.digits}f}" if rounded else f"{0:.{self.digits}f}"

    def within(self, report: Report) -> bool:
        """Whether any row differs from the full model in this way."""
        return any(row.to_full is not None and self.of(row.to_full) for row in report.rows)


ACC = Kind("Acc.", lambda gaps: gaps.acc)
SAMPLES = Kind("samples", lambda gaps: gaps.accuracy)
POINTS = Kind("MME", lambda gaps: gaps.mme)
LN_P = Kind("ln p", lambda gaps: gaps.logprob, digits=3)


@dataclass(frozen=True)
class Table:
    """Cells with a title; the first ``left`` columns are text, the others figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def tables(report: Report) -> Iterator[Table]:
    """Every table that the report has rows for."""
    # Benchmarks that score no single answers leave no difference of Acc.
    kinds = [ACC if ACC.within(report) else SAMPLES, *([LN_P] if LN_P.within(report) else [])]
    yield from _main(report, kinds)
    yield from _gains(report, kinds)
    yield from _components(report)
    yield from _quotas(report)
    if report.refused:
        rows = [[case.label, str(case.budget), case.refused] for case in report.refused]
        yield Table("Cannot be served", ["method", "K", "why"], rows, left=3)


def _main(report: Report, kinds: Sequence[Kind]) -> Iterator[Table]:
    """As the paper's main table, one part for each budget, full tokens on top of each."""
    arms = ("full", "random", "base", "autoprune", "found")
    shown = [row for row in report.rows if row.case.arm in arms]
    full = [row for row in shown if row.case.arm == "full"]
    names = list(report.rows[0].benchmarks)
    head = ["method", *names, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    if report.rows[0].without_mmbench is not None:
        head += ["Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB"]
    head += [f"{kind.name} less {other}" for kind in kinds for other in ("full", "base")]
    for budget in _budgets(shown):
        rows = [*full, *(row for row in shown if row.case.budget == budget)]
        yield Table(f"K = {budget}", head, [_cells(row, names, kinds) for row in rows])


def _cells(row: Row, names: Sequence[str], kinds: Sequence[Kind]) -> list[str]:
    cells = [row.case.label, *(f"{row.benchmarks[name]:.1f}" for name in names)]
    for part in (row.all, row.without_mmbench):
        if part is not None:
            cells += [f"{part.acc:.1f}", _figure(part.ratio_of_means), _figure(part.mean_of_ratios)]
    return cells + [kind.cell(gaps) for kind in kinds for gaps in (row.to_full, row.to_base)]


def _gains(report: Report, kinds: Sequence[Kind]) -> Iterator[Table]:
    """What the residual adds to each base policy, as the paper's table over base policies."""
    rows = [row for row in report.rows if row.case.arm == "autoprune" and row.to_base is not None]
    if len(rows) < 2:
        return
    budgets = _budgets(rows)
    alone = {row.case.name: row.case.label for row in report.rows}
    gaps = {(alone[row.case.base], row.case.budget): row.to_base for row in rows}
    head = ["base policy", *(f"K = {budget}" for budget in budgets)]
    for kind in kinds:
        cells = [
            [label, *(kind.cell(gaps.get((label, budget))) for budget in budgets)]
            for label in dict.fromkeys(label for label, _ in gaps)
        ]
        yield Table(f"AutoPrune less strategy only, {kind.name}", head, cells)


def _components(report: Report) -> Iterator[Table]:
    """The paper's ablation of components, between the base policy and AutoPrune."""
    rows = []
    for own in _by_budget(report, "component"):
        base, whole = report.of(own[0].case.base), _residual_of(report, own[0])
        for row in (base, *own, whole):
            if row is not None:
                rows.append([str(own[0].case.budget), row.case.label, *_ablation(row, whole)])
    if rows:
        head = ["K", "method", "MME", "less base", "less AutoPrune", "Acc. less base",
                "ln p less base"]  # fmt: skip
        yield Table("Ablation of components", head, rows, left=2)


def _ablation(row: Row, whole: Row | None) -> list[str]:
    mme = row.benchmarks.get(MME)
    over = None if whole is None or whole is row else whole.benchmarks.get(MME)
    less = NONE if mme is None or over is None else f"{mme - over:+.1f}"
    gaps = row.to_base
    return [_figure(mme), POINTS.cell(gaps), less, ACC.cell(gaps), LN_P.cell(gaps)]


def _quotas(report: Report) -> Iterator[Table]:
    """The paper's sweep of q_e; differences are to the base policy, which exchanges nothing."""
    rows = []
    for own in _by_budget(report, "quota"):
        whole = _residual_of(report, own[0])
        swept = [*own, whole] if whole is not None else own
        for row in sorted(swept, key=lambda row: row.case.quota or 0):
            budget, quota, gaps = row.case.budget, row.case.quota or 0, row.to_base
            rows.append([str(budget), str(quota), str(max(budget - quota, 0)),
                         _figure(row.benchmarks.get(MME)),
                         POINTS.cell(gaps), ACC.cell(gaps), LN_P.cell(gaps)])  # fmt: skip
    if rows:
        head = ["K", "q_e", "K - q_e", "MME", "less base", "Acc. less base", "ln p less base"]
        yield Table("Sweep of the exchange quota", head, rows, left=0)


def _by_budget(report: Report, arm: Arm) -> Iterator[list[Row]]:
    rows = [row for row in report.rows if row.case.arm == arm]
    for budget in _budgets(rows):
        yield [row for row in rows if row.case.budget == budget]


def _residual_of(report: Report, row: Row) -> Row | None:
    """AutoPrune on the same base policy at the same budget."""
    ours = (other for other in report.rows if other.case.arm == "autoprune")
    return next((other for other in ours if other.case.base == row.case.base), None)


def _budgets(rows: Sequence[Row]) -> list[int]:
    return sorted({row.case.budget for row in rows if row.case.budget}, reverse=True)


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"
