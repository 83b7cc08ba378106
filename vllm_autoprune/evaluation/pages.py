"""A report as a page of Markdown, and its tables as LaTeX."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_autoprune.evaluation.published import read_published
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.resizing import format_verdicts
from vllm_autoprune.evaluation.tables import build_tables, compare_with_published
from vllm_autoprune.report import Row, Table

_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
            **{sign: f"\\{sign}" for sign in "&%$#_{}"}}  # fmt: skip

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


def as_markdown(report: Report) -> str:
    """Verdict, tables, and what the columns mean."""
    return "\n".join(_markdown(report)) + "\n"


def as_latex(report: Report) -> str:
    """All tables in the style of ``booktabs``, with the verdict as a comment above them."""
    return "\n".join(_latex(report)) + "\n"


def _verdict(report: Report) -> Iterator[str]:
    """Whether the report is valid, and every reason against it."""
    trial = format_trial(report)
    yield "NOT VALID" if not report.valid else f"valid. {trial}" if trial else "valid"
    yield from (f"- {reason}" for reason in report.reasons)


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


def _markdown(report: Report) -> Iterator[str]:
    setup = report.setup
    yield f"# Accuracy: {setup.suite}"
    yield ""
    yield f"Model: {setup.model}. Data: {setup.data}. Scored by {setup.scorer}."
    yield f"{report.questions:,} questions about {report.images:,} images, the same in every row."
    yield ""
    yield "Verdict: " + "\n".join(_verdict(report))
    if verdicts := list(format_verdicts(report.resizing)):
        yield "\n## Pruning or resizing?\n"
        yield from _full_accuracy(report)
        yield from (f"- {line}" for line in verdicts)
    for table in all_tables(report):
        yield f"\n## {table.caption}\n\n{table.markdown()}"
    if report.rows:
        yield ""
        yield from (f"- {note}" for note in describe_notes(report))


def _full_accuracy(report: Report) -> Iterator[str]:
    """How many answers are right with all tokens, and what a small share may come from."""
    full = next((row.accuracy for row in report.rows if row.case.arm == "full"), None)
    if full is not None:
        yield f"With all tokens, {full.value:.1f} % of the answers are right."
        if full.value < _FEW_RIGHT:
            yield (
                "An answer is right if the model gives exactly it: where it is not written as the "
                "model writes it, it is wrong in every row."
            )
        yield ""


def _latex(report: Report) -> Iterator[str]:
    setup = report.setup
    yield f"% {setup.suite}: {setup.model}; {setup.data}; {setup.scorer}"
    yield from (f"% {line}" for line in _verdict(report))
    for table in all_tables(report):
        yield ""
        yield r"\begin{table}[t]"
        yield r"\centering"
        yield f"\\caption{{{_escape(table.caption)}}}"
        yield f"\\begin{{tabular}}{{{table.align}}}"
        yield r"\toprule"
        yield _latex_row(table.columns)
        yield r"\midrule"
        yield from (_latex_row(row) for row in table.rows)
        yield r"\bottomrule"
        yield r"\end{tabular}"
        yield r"\end{table}"


def _latex_row(cells: Row) -> str:
    return " & ".join(_escape(str(cell)) for cell in cells) + r" \\"


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(sign, sign) for sign in text)
