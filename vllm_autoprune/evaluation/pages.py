"""The pages of a report: its tables as Markdown, and in HTML with a chart over K."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_autoprune.evaluation import published
from vllm_autoprune.evaluation.journal import MME, Arm
from vllm_autoprune.evaluation.published import read_published
from vllm_autoprune.evaluation.report import (
    MIN_IMAGES,
    Comparison,
    Differences,
    Report,
    Row,
)
from vllm_autoprune.report import (
    Chart,
    Document,
    Mark,
    Rule,
    Section,
    Series,
    Table,
    Tone,
    render_document,
)
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
    return cells + [metric.cell(differences[other]) for metric in metrics for other in others]


def _resizing_tables(report: Report) -> Iterator[Table]:
    """Each case less the resize control, per cent right: by budget, and then by kind."""
    budgets = sorted({comparison.budget for comparison in report.resizing}, reverse=True)
    overall = {
        (comparison.label, comparison.budget): format_difference(comparison)
        for comparison in report.resizing
        if comparison.kind is None
    }
    if overall:
        rows = [
            [label, *(overall.get((label, budget), NO_VALUE) for budget in budgets)]
            for label in dict.fromkeys(label for label, _ in overall)
        ]
        head = ["method", *(f"K = {budget}" for budget in budgets)]
        yield build_table("Less the resize control, per cent right", head, rows)
    kinds = list(
        dict.fromkeys(
            comparison.kind for comparison in report.resizing if comparison.kind is not None
        )
    )
    if not kinds:
        return
    head = ["method", *kinds]
    for budget in budgets:
        at_budget = [comparison for comparison in report.resizing if comparison.budget == budget]
        cells = {
            (comparison.label, comparison.kind): format_difference(comparison)
            for comparison in at_budget
        }
        rows = [
            [label, *(cells.get((label, kind), NO_VALUE) for kind in kinds)]
            for label in dict.fromkeys(comparison.label for comparison in at_budget)
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
    for sweep in _by_budget(report, "quota"):
        complete = _complete_residual(report, sweep[0])
        swept = {row.case.quota for row in sweep}
        quotas = (
            [*sweep, complete]
            if complete is not None and complete.case.quota not in swept
            else sweep
        )
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
    comparable = len(shared) == len(table.benchmarks) == len(ours.benchmarks)
    rel = f"{row.rel:.1f}"
    cells = [row.method, str(row.tokens)]
    cells += [f"{ours.benchmarks[name]:.1f} / {scores[name]:.1f}" for name in shared]
    # Means over different benchmarks cannot be compared.
    cells.append(f"{ours.all.acc:.1f} / {row.acc if comparable else NO_VALUE}")
    for value, kind in (
        (ours.all.ratio_of_means, "ratio of means"),
        (ours.all.mean_of_ratios, "mean of ratios"),
    ):
        follows = comparable and row.rel_follows in (kind, "both")
        measured = NO_VALUE if value is None else f"{value:.1f}"
        cells.append(f"{measured} / {rel if follows else NO_VALUE}")
    return cells


def format_verdicts(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """One line for each stated case: who wins overall, by how much, and for which kinds."""
    by_case: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.stated:
            by_case.setdefault(comparison.case, []).append(comparison)
    for members in by_case.values():
        overall = next((comparison for comparison in members if comparison.kind is None), None)
        if overall is None:
            continue
        verdict = {
            "pruning": "pruning beats resizing",
            "resizing": "resizing beats pruning",
            "not decided": "not decided between pruning and resizing",
            "too few images": f"{overall.images} images are too few to decide (at least "
            f"{MIN_IMAGES})",
        }[overall.winner]
        more = f" with {overall.more_tokens:.1f} tokens more" if overall.more_tokens >= 0.5 else ""
        place = f"{overall.label}, K = {overall.budget}"
        line = f"{place}: {verdict}, {format_difference(overall)} points right{more}."
        parts = []
        for winner in ("pruning", "resizing", "not decided", "too few images"):
            kinds = [
                comparison
                for comparison in members
                if comparison.kind is not None and comparison.winner == winner
            ]
            if kinds:
                wins = f"{winner} wins" if winner in ("pruning", "resizing") else winner
                named = ", ".join(
                    f"{comparison.kind} {format_difference(comparison)}" for comparison in kinds
                )
                parts.append(f"{wins}: {named}")
        yield line + (f" By kind: {'; '.join(parts)}." if parts else "")


def format_difference(comparison: Comparison) -> str:
    """The difference with its interval, such as ``+5.1 (+2.0 to +8.1)``."""
    value, low, high = (
        f"{figure:+.1f}"
        for figure in (
            comparison.difference.value,
            comparison.difference.low,
            comparison.difference.high,
        )
    )
    return f"{value} ({low} to {high})"


_MIN_IMAGES = 20
"""With fewer images than this, bootstrap intervals over images are too narrow."""

_FEW_RIGHT = 50
"""Per cent right with all tokens below which the answers are probably written in another way."""

_NOTES = (
    "Acc. is the mean over benchmarks, with MME divided by {divisor:g} first. Rel. is given by "
    "both definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over "
    "benchmarks of a score over the full model's.",
    "Differences are paired on the same questions, each with its 95 % interval ({images} images "
    "resampled). If an interval contains 0, the data show no difference. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K, resized "
    "the resize control: the image resized to at most K tokens, or pooled to K where the model has "
    "a fixed number of them.",
)


def format_trial(report: Report) -> str:
    """What a run on few images is; empty for a run on enough of them."""
    if report.images >= _MIN_IMAGES:
        return ""
    return (
        f"A trial run: {report.images} images are too few for a measurement (at least "
        f"{_MIN_IMAGES}), and the intervals are too narrow to be quoted."
    )


def describe_notes(report: Report) -> Iterator[str]:
    """What the columns of the tables mean."""
    for note in _NOTES:
        yield note.format(divisor=report.setup.mme_divisor, images=f"{report.images:,}")


def all_tables(report: Report) -> Iterator[Table]:
    """The measured tables, then the comparison with the published ones."""
    if report.rows:
        yield from build_tables(report)
        yield from compare_with_published(report, read_published())


def as_markdown(report: Report) -> str:
    """Verdict, tables, and what the columns mean."""
    setup, trial = report.setup, format_trial(report)
    verdict = "NOT VALID" if not report.valid else f"valid. {trial}" if trial else "valid"
    lines = [
        f"# Accuracy: {setup.suite}",
        "",
        f"Model: {setup.model}. Data: {setup.data}. Scored by {setup.scorer}.",
        f"{report.questions:,} questions about {report.images:,} images, the same in every row.",
        "",
        f"Verdict: {verdict}",
        *(f"- {reason}" for reason in report.reasons),
    ]
    if verdicts := list(format_verdicts(report.resizing)):
        lines.append("\n## Pruning or resizing?\n")
        full = next((row.accuracy for row in report.rows if row.case.arm == "full"), None)
        if full is not None:
            lines.append(f"With all tokens, {full.value:.1f} % of the answers are right.")
            if full.value < _FEW_RIGHT:
                lines.append(
                    "An answer is right if the model gives exactly it: where it is not written as "
                    "the model writes it, it is wrong in every row."
                )
            lines.append("")
        lines += (f"- {line}" for line in verdicts)
    lines += (f"\n## {table.caption}\n\n{table.markdown()}" for table in all_tables(report))
    if report.rows:
        lines += ["", *(f"- {note}" for note in describe_notes(report))]
    return "\n".join(lines) + "\n"


_PRUNING_ARMS: tuple[Arm, ...] = ("found", "autoprune", "base")
"""Kinds of cases that the answer may be about, the most specific first."""


def as_html(report: Report) -> str:
    """The whole page."""
    answer, tone = _answer(report)
    setup, trial = report.setup, format_trial(report)
    sections = []
    if verdicts := list(format_verdicts(report.resizing)):
        sections.append(Section("Pruning or resizing?", verdicts))
    if chart := _draw_budgets(report):
        text = "Bars: 95 % intervals, images resampled."
        sections.append(Section("Accuracy over K", [text], [chart]))
    if report.rows:
        tables = list(all_tables(report))
        sections.append(Section("Tables", list(describe_notes(report)), tables=tables))
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
            sections=sections,
        )
    )


def _answer(report: Report) -> tuple[str, Tone]:
    if not report.valid:
        return "Not valid: the reasons are below, and no figure here is to be quoted.", "bad"
    # The state that was to be evaluated, at its largest budget.
    rows = [row for row in report.rows if row.case.arm in _PRUNING_ARMS and row.to_full is not None]
    rows.sort(key=lambda row: (_PRUNING_ARMS.index(row.case.arm), -row.case.budget))
    if not rows or rows[0].to_full is None:
        return "Nothing was pruned in this evaluation: only full tokens were measured.", "open"
    row, difference = rows[0], rows[0].to_full.accuracy or rows[0].to_full.acc
    sentence = f"{row.case.label} at K = {row.case.budget}"
    if row.accuracy is not None:
        sentence += f" answers {row.accuracy.value:.1f} % of the questions right"
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


def _draw_budgets(report: Report) -> Chart | None:
    """Per cent right over K, one line a method; None where answers are not scored one by one."""
    pruned = [row for row in report.rows if row.case.arm != "full" and row.accuracy is not None]
    if not pruned:
        return None
    series = []
    for colour, label in enumerate(dict.fromkeys(row.case.label for row in pruned)):
        points = sorted((r for r in pruned if r.case.label == label), key=lambda r: r.case.budget)
        series.append(Series(label, [_mark(row) for row in points], colour=colour))
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
    accuracy = row.accuracy
    interval = f"{accuracy.low:.1f}–{accuracy.high:.1f}"
    tip = f"{row.case.label}, K = {row.case.budget}\n{accuracy.value:.1f} % ({interval})"
    if row.prompt_tokens is not None:
        tip += f"\n{row.prompt_tokens:.0f} prompt tokens"
    return Mark(row.case.budget, accuracy.value, tip, accuracy.low, accuracy.high)
