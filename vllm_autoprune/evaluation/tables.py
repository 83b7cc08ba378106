"""The tables of an evaluation: results by budget, gains, quotas, published rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_autoprune.evaluation import published
from vllm_autoprune.evaluation.records import MME, Arm
from vllm_autoprune.evaluation.report import Differences, Report, Row
from vllm_autoprune.evaluation.resizing import format_difference
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate

NO_VALUE = "-"


@dataclass(frozen=True)
class Metric:
    """A metric whose differences fill a column: its name, its field, and its decimals."""

    name: str
    of: Callable[[Differences], Estimate | None]
    digits: int = 1

    def cell(self, differences: Differences | None) -> str:
        """The difference with its interval."""
        estimate = None if differences is None else self.of(differences)
        if estimate is None:
            return NO_VALUE
        value, low, high = map(self._signed, (estimate.value, estimate.low, estimate.high))
        return f"{value} ({low} to {high})"

    def _signed(self, value: float) -> str:
        """The rounded value with its sign; what rounds to zero has none, so no loss is claimed."""
        rounded = round(value, self.digits)
        return f"{rounded:+.{self.digits}f}" if rounded else f"{0:.{self.digits}f}"

    def is_in(self, report: Report) -> bool:
        """Whether any row has a difference to the full model in this metric."""
        return any(row.to_full is not None and self.of(row.to_full) for row in report.rows)


ACC = Metric("Acc.", lambda differences: differences.acc)
SAMPLES = Metric("samples", lambda differences: differences.accuracy)
POINTS = Metric("MME", lambda differences: differences.mme)
LN_P = Metric("ln p", lambda differences: differences.logprob, digits=3)


def build_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> Table:
    """A table whose first ``left`` columns are text and aligned left, the others figures."""
    return Table(caption, columns, rows, "l" * left + "r" * (len(columns) - left))


def build_tables(report: Report) -> Iterator[Table]:
    """Every table for which the report has rows."""
    # There is no difference of Acc. if a benchmark does not score single answers.
    metrics = [ACC if ACC.is_in(report) else SAMPLES, *([LN_P] if LN_P.is_in(report) else [])]
    yield from _result_tables(report, metrics)
    yield from _resizing_tables(report)
    yield from _gain_tables(report, metrics)
    yield from _quota_table(report)
    if report.refused:
        rows = [[case.label, str(case.budget), case.refused] for case in report.refused]
        yield build_table("Cannot be served", ["method", "K", "why"], rows, left=3)


def _result_tables(report: Report, metrics: Sequence[Metric]) -> Iterator[Table]:
    """The paper's main table, one part for each budget, each with the full model on top."""
    arms = ("full", "random", "resized", "base", "autoprune", "found")
    listed = [row for row in report.rows if row.case.arm in arms]
    full = [row for row in listed if row.case.arm == "full"]
    names = list(report.rows[0].benchmarks)
    head = ["method", *names, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    if report.rows[0].without_mmbench is not None:
        head += ["Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB"]
    others = ["full", "base"]
    if any(row.case.arm == "resized" for row in listed):
        others.append("resized")
    head += [f"{metric.name} less {other}" for metric in metrics for other in others]
    for budget in _budgets(listed):
        rows = [*full, *(row for row in listed if row.case.budget == budget)]
        cells = [_cells(row, names, metrics, others) for row in rows]
        yield build_table(f"K = {budget}", head, cells)


def _cells(
    row: Row, names: Sequence[str], metrics: Sequence[Metric], others: Sequence[str]
) -> list[str]:
    cells = [row.case.label, *(f"{row.benchmarks[name]:.1f}" for name in names)]
    for part in (row.all, row.without_mmbench):
        if part is not None:
            cells += [f"{part.acc:.1f}", _figure(part.ratio_of_means), _figure(part.mean_of_ratios)]
    differences = {"full": row.to_full, "base": row.to_base, "resized": row.to_resized}
    return cells + [metric.cell(differences[one]) for metric in metrics for one in others]


def _resizing_tables(report: Report) -> Iterator[Table]:
    """Each case less the resize control, per cent right: by budget, and then by kind."""
    budgets = sorted({one.budget for one in report.resizing}, reverse=True)
    overall = {
        (one.label, one.budget): format_difference(one)
        for one in report.resizing
        if one.kind is None
    }
    if overall:
        rows = [
            [label, *(overall.get((label, budget), NO_VALUE) for budget in budgets)]
            for label in dict.fromkeys(label for label, _ in overall)
        ]
        head = ["method", *(f"K = {budget}" for budget in budgets)]
        yield build_table("Less the resize control, per cent right", head, rows)
    kinds = list(dict.fromkeys(one.kind for one in report.resizing if one.kind is not None))
    if not kinds:
        return
    head = ["method", *kinds]
    for budget in budgets:
        own = [one for one in report.resizing if one.budget == budget]
        cells = {(one.label, one.kind): format_difference(one) for one in own}
        rows = [
            [label, *(cells.get((label, kind), NO_VALUE) for kind in kinds)]
            for label in dict.fromkeys(one.label for one in own)
        ]
        yield build_table(f"Less the resize control by kind of question, K = {budget}", head, rows)


def _gain_tables(report: Report, metrics: Sequence[Metric]) -> Iterator[Table]:
    """The gain of the residual over each base policy, as in the paper's table."""
    rows = [row for row in report.rows if row.case.arm == "autoprune" and row.to_base is not None]
    if len(rows) < 2:
        return
    budgets = _budgets(rows)
    labels = {row.case.name: row.case.label for row in report.rows}
    gains = {(labels[row.case.base], row.case.budget): row.to_base for row in rows}
    head = ["base policy", *(f"K = {budget}" for budget in budgets)]
    for metric in metrics:
        cells = [
            [label, *(metric.cell(gains.get((label, budget))) for budget in budgets)]
            for label in dict.fromkeys(label for label, _ in gains)
        ]
        yield build_table(f"AutoPrune less strategy only, {metric.name}", head, cells)


def _quota_table(report: Report) -> Iterator[Table]:
    """The paper's values of q_e; differences are to the base policy, which exchanges nothing."""
    rows = []
    for own in _by_budget(report, "quota"):
        whole = _complete_residual(report, own[0])
        swept = {row.case.quota for row in own}
        quotas = [*own, whole] if whole is not None and whole.case.quota not in swept else own
        for row in sorted(quotas, key=lambda row: row.case.quota or 0):
            budget, quota, gain = row.case.budget, row.case.quota or 0, row.to_base
            rows.append([str(budget), str(quota), str(max(budget - quota, 0)),
                         _figure(row.benchmarks.get(MME)),
                         POINTS.cell(gain), ACC.cell(gain), LN_P.cell(gain)])  # fmt: skip
    if rows:
        head = ["K", "q_e", "K - q_e", "MME", "less base", "Acc. less base", "ln p less base"]
        yield build_table("Sweep of the exchange quota", head, rows, left=0)


def _by_budget(report: Report, arm: Arm) -> Iterator[list[Row]]:
    rows = [row for row in report.rows if row.case.arm == arm]
    for budget in _budgets(rows):
        yield [row for row in rows if row.case.budget == budget]


def _complete_residual(report: Report, row: Row) -> Row | None:
    """AutoPrune with its complete residual, on the same base policy at the same budget."""
    candidates = (other for other in report.rows if other.case.arm == "autoprune")
    return next((other for other in candidates if other.case.base == row.case.base), None)


def _budgets(rows: Sequence[Row]) -> list[int]:
    return sorted({row.case.budget for row in rows if row.case.budget}, reverse=True)


def _figure(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.1f}"


def compare_with_published(measured: Report, source: published.Published) -> Iterator[Table]:
    """One table for each published one of the backbone that shares a method, K and benchmark."""
    for table in source.tables:
        if table.backbone != measured.setup.backbone:
            continue
        pairs = [(row, match) for row in measured.rows if (match := _published_row(table, row))]
        shared = [name for name in table.benchmarks if pairs and name in pairs[0][0].benchmarks]
        if shared:
            head = ["method", "K", *shared, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
            rows = [_comparison_cells(table, shared, ours, theirs) for ours, theirs in pairs]
            yield build_table(f"Ours / published, {table.table}, {table.backbone}", head, rows)


def _published_row(table: published.Table, ours: Row) -> published.Row | None:
    """The published row of the same method and budget, if there is one."""
    case = ours.case
    names = {"full": "full", "autoprune": "AutoPrune", "base": case.label}
    if case.arm not in names or (case.arm == "autoprune" and not case.base.startswith("cdpruner@")):
        return None  # the published rows of AutoPrune are all on CDPruner
    method = _normalise_name(names[case.arm])
    for row in table.rows:
        same_budget = case.arm == "full" or row.tokens == case.budget
        if _normalise_name(row.method) == method and same_budget:
            return row
    return None


def _normalise_name(name: str) -> str:
    return "".join(c for c in name.lower().replace("+", "plus") if c.isalnum())


def _comparison_cells(
    table: published.Table, shared: list[str], ours: Row, row: published.Row
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
