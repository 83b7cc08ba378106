"""The page of a report: what came out, pruning against resizing, a chart over K, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_autoprune.evaluation import published
from vllm_autoprune.evaluation.journal import Arm
from vllm_autoprune.evaluation.report import MIN_IMAGES, Comparison, Differences, Report, Row
from vllm_autoprune.report import (
    Chart,
    Document,
    Mark,
    Rule,
    Section,
    Series,
    Table,
    Tone,
)
from vllm_autoprune.statistics import Estimate

_NONE = "-"
_PRUNING_ARMS: tuple[Arm, ...] = ("found", "autoprune", "base")
"""Kinds of cases that the answer may be about, the most specific first."""

_TRIAL_IMAGES = 20
"""With fewer images than this, bootstrap intervals over images are too narrow."""
_FEW_RIGHT = 50
"""Per cent right with all tokens below which the answers are probably written in another way."""

_NOTES = (
    "Acc. is the mean over benchmarks, with MME divided by {divisor:g} first. Rel. is given by "
    "both definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over "
    "benchmarks of a score over the full model's.",
    "Differences are paired on the same questions, each with its 95 % interval ({images:,} images "
    "resampled). If an interval contains 0, the data show no difference. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K, resized "
    "the resize control: the image resized to at most K tokens, or pooled to K where the model has "
    "a fixed number of them.",
)


@dataclass(frozen=True)
class _Metric:
    """A metric whose differences fill a column: its name, its field, and its decimals."""

    name: str
    of: Callable[[Differences], Estimate | None]
    digits: int = 1

    def cell(self, differences: Differences | None) -> str:
        return _format(None if differences is None else self.of(differences), self.digits)

    def is_in(self, report: Report) -> bool:
        return any(row.to_full is not None and self.of(row.to_full) for row in report.rows)


_ACC = _Metric("Acc.", lambda differences: differences.acc)
_SAMPLES = _Metric("samples", lambda differences: differences.accuracy)
_LN_P = _Metric("ln p", lambda differences: differences.logprob, digits=3)


def _format(estimate: Estimate | None, digits: int = 1) -> str:
    """A difference with its interval, such as ``+5.1 (+2.0 to +8.1)``.

    What rounds to zero has no sign, so that no loss is claimed.
    """
    if estimate is None:
        return _NONE
    value, low, high = (
        f"{rounded:+.{digits}f}" if (rounded := round(figure, digits)) else f"{0:.{digits}f}"
        for figure in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low} to {high})"


def build_document(report: Report) -> Document:
    """The whole page."""
    setup, answer, tone = report.setup, *_answer(report)
    warnings = list(report.reasons)
    if report.valid and report.images < _TRIAL_IMAGES:
        warnings.append(
            f"A trial run: {report.images} images are too few for a measurement (at least "
            f"{_TRIAL_IMAGES}), and the intervals are too narrow to be quoted."
        )
    full = next((row.accuracy for row in report.rows if row.case.arm == "full"), None)
    sections = []
    if verdicts := list(_verdicts(report.resizing)):
        if full is not None:
            right = f"With all tokens, {full.value:.1f} % of the answers are right."
            if full.value < _FEW_RIGHT:
                right += (
                    " An answer is right if the model gives exactly it: where it is not written "
                    "as the model writes it, it is wrong in every row."
                )
            verdicts.insert(0, right)
        sections.append(Section("Pruning or resizing?", verdicts))
    if chart := _draw_budgets(report, full):
        text = "Bars: 95 % intervals, images resampled."
        sections.append(Section("Accuracy over K", [text], [chart]))
    if report.rows:
        notes = [note.format(divisor=setup.mme_divisor, images=report.images) for note in _NOTES]
        sections.append(Section("Tables", notes, tables=list(_tables(report))))
    return Document(
        title=f"Accuracy: {setup.suite}",
        answer=answer,
        tone=tone,
        warnings=warnings,
        facts=[
            f"model: {setup.model}",
            f"data: {setup.data}",
            f"scored by {setup.scorer}",
            f"{report.questions:,} questions about {report.images:,} images",
        ],
        sections=sections,
    )


def _answer(report: Report) -> tuple[str, Tone]:
    """What came out, of the state that was to be evaluated, at its largest budget."""
    if not report.valid:
        return "Not valid: the reasons are below, and no figure here is to be quoted.", "bad"
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
            word, tone = ("fewer", "bad") if difference.value < 0 else ("more", "good")
            sentence += f", {abs(difference.value):.1f} points {word} than with all tokens ({ends})"
    if report.images < _TRIAL_IMAGES:
        return f"A trial run on {report.images} images, no measurement: {sentence}.", "open"
    return f"{sentence}.", tone


def _verdicts(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One line for each stated case: who wins overall, by how much, and for which kinds."""
    for overall in comparisons:
        if not overall.stated or overall.kind is not None:
            continue
        kinds = [row for row in comparisons if row.case == overall.case and row.kind is not None]
        verdict = {
            "pruning": "pruning beats resizing",
            "resizing": "resizing beats pruning",
            "not decided": "not decided between pruning and resizing",
            "too few images": f"{overall.images} images are too few to decide (at least "
            f"{MIN_IMAGES})",
        }[overall.winner]
        more = f" with {overall.more_tokens:.1f} tokens more" if overall.more_tokens >= 0.5 else ""
        line = (
            f"{overall.label}, K = {overall.budget}: {verdict}, {_format(overall.difference)} "
            f"points right{more}."
        )
        parts = []
        for winner in ("pruning", "resizing", "not decided", "too few images"):
            named = [f"{row.kind} {_format(row.difference)}" for row in kinds
                     if row.winner == winner]  # fmt: skip
            if named:
                wins = " wins" if winner in ("pruning", "resizing") else ""
                parts.append(f"{winner}{wins}: {', '.join(named)}")
        yield line + (f" By kind: {'; '.join(parts)}." if parts else "")


def _draw_budgets(report: Report, full: Estimate | None) -> Chart | None:
    """Per cent right over K, one line a method; None where answers are not scored one by one."""
    series: dict[str, list[Mark]] = {}
    budgets = {}
    for row in sorted(report.rows, key=lambda row: row.case.budget):
        label, budget, accuracy = row.case.label, row.case.budget, row.accuracy
        if row.case.arm == "full" or accuracy is None:
            continue
        interval = f"{accuracy.low:.1f}–{accuracy.high:.1f}"
        tip = f"{label}, K = {budget}\n{accuracy.value:.1f} % ({interval})"
        if row.prompt_tokens is not None:
            tip += f"\n{row.prompt_tokens:.0f} prompt tokens"
        budgets[float(budget)] = str(budget)
        mark = Mark(budget, accuracy.value, tip, accuracy.low, accuracy.high)
        series.setdefault(label, []).append(mark)
    if not series:
        return None
    order = [label for label in dict.fromkeys(r.case.label for r in report.rows) if label in series]
    return Chart(
        "Questions answered right",
        "visual tokens kept, K",
        "right, %",
        [Series(label, series[label], colour=colour) for colour, label in enumerate(order)],
        [Rule(full.value, f"all tokens {full.value:.1f} %")] if full is not None else [],
        x_scale="log",
        x_names=budgets,
    )


def _tables(report: Report) -> Iterator[Table]:
    """Every table for which the report has rows, then the comparison with published ones."""
    # There is no difference of Acc. if a benchmark does not score single answers.
    metrics = [_ACC if _ACC.is_in(report) else _SAMPLES, *([_LN_P] if _LN_P.is_in(report) else [])]
    yield from _result_tables(report, metrics)
    yield from _resizing_tables(report)
    if report.refused:
        refused = [[case.label, str(case.budget), case.refused] for case in report.refused]
        yield Table("Cannot be served", ["method", "K", "why"], refused, "lll")
    for table in published.read_published().tables:
        if table.backbone == report.setup.backbone:
            yield from _compare_with_published(report, table)


def _figures_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(caption, head, rows, "l" + "r" * (len(head) - 1))


def _result_tables(report: Report, metrics: Sequence[_Metric]) -> Iterator[Table]:
    """The paper's main table, one part for each budget, each with the full model on top.

    The gain of a residual, and of each q_e, is its difference to its base policy.
    """
    names = list(report.rows[0].benchmarks)
    head = ["method", *names, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    if report.rows[0].without_mmbench is not None:
        head += ["Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB"]
    others = ["full", "base"]
    if any(row.case.arm == "resized" for row in report.rows):
        others.append("resized")
    head += [f"{metric.name} less {other}" for metric in metrics for other in others]
    budgets = {row.case.budget for row in report.rows if row.case.budget}
    for budget in sorted(budgets, reverse=True):
        rows = []
        for row in report.rows:
            if row.case.budget not in (0, budget):
                continue
            cells = [row.case.label, *(f"{row.benchmarks[name]:.1f}" for name in names)]
            for part in (row.all, row.without_mmbench):
                if part is not None:
                    figures = (part.acc, part.ratio_of_means, part.mean_of_ratios)
                    cells += map(_figure, figures)
            differences = {"full": row.to_full, "base": row.to_base, "resized": row.to_resized}
            cells += [metric.cell(differences[other]) for metric in metrics for other in others]
            rows.append(cells)
        yield _figures_table(f"K = {budget}", head, rows)


def _resizing_tables(report: Report) -> Iterator[Table]:
    """Each case less the resize control, per cent right: by budget, and then by kind."""
    budgets = sorted({comparison.budget for comparison in report.resizing}, reverse=True)
    cells = {(c.label, c.budget, c.kind): _format(c.difference) for c in report.resizing}
    if budgets:
        by_budget = {
            (label, f"K = {budget}"): cell
            for budget in budgets  # the columns in this order
            for (label, at, kind), cell in cells.items()
            if at == budget and kind is None
        }
        yield _pivot("Less the resize control, per cent right", by_budget)
    for budget in budgets:
        by_kind = {(label, kind): cell for (label, at, kind), cell in cells.items()
                   if at == budget and kind is not None}  # fmt: skip
        if by_kind:
            caption = f"Less the resize control by kind of question, K = {budget}"
            yield _pivot(caption, by_kind)


def _pivot(caption: str, cells: Mapping[tuple[str, str], str]) -> Table:
    """A table of cells by row and column, in the order in which these first occur."""
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = [
        [label, *(cells.get((label, column), _NONE) for column in columns)]
        for label in dict.fromkeys(label for label, _ in cells)
    ]
    return _figures_table(caption, ["method", *columns], rows)


def _figure(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _compare_with_published(measured: Report, table: published.Table) -> Iterator[Table]:
    """A published table beside what was measured of it: methods, budgets and benchmarks of both."""
    pairs = [(row, match) for row in measured.rows if (match := _published_row(table, row))]
    shared = [name for name in table.benchmarks if pairs and name in pairs[0][0].benchmarks]
    if not shared:
        return
    # Means over different benchmarks cannot be compared.
    comparable = len(shared) == len(table.benchmarks) == len(pairs[0][0].benchmarks)
    rows = []
    for row, printed in pairs:
        scores = table.scores(printed)
        cells = [printed.method, str(printed.tokens)]
        cells += [f"{row.benchmarks[name]:.1f} / {scores[name]:.1f}" for name in shared]
        cells.append(f"{row.all.acc:.1f} / {printed.acc if comparable else _NONE}")
        for value, definition in (
            (row.all.ratio_of_means, "ratio of means"),
            (row.all.mean_of_ratios, "mean of ratios"),
        ):
            follows = comparable and printed.rel_follows in (definition, "both")
            cells.append(f"{_figure(value)} / {f'{printed.rel:.1f}' if follows else _NONE}")
        rows.append(cells)
    head = ["method", "K", *shared, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    yield _figures_table(f"Ours / published, {table.table}, {table.backbone}", head, rows)


def _published_row(table: published.Table, row: Row) -> published.Row | None:
    """The published row of the same method and budget, if there is one."""

    def normalise(name: str) -> str:
        return "".join(c for c in name.lower().replace("+", "plus") if c.isalnum())

    case = row.case
    names = {"full": "full", "autoprune": "AutoPrune", "base": case.label}
    if case.arm not in names or (case.arm == "autoprune" and not case.base.startswith("cdpruner@")):
        return None  # the published rows of AutoPrune are all on CDPruner
    method = normalise(names[case.arm])
    return next(
        (
            printed
            for printed in table.rows
            if normalise(printed.method) == method
            and (case.arm == "full" or printed.tokens == case.budget)
        ),
        None,
    )
