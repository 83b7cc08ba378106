"""A report as a page of Markdown, and its tables as LaTeX.

Knows nothing about what the cells say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.accuracy.beside import beside
from benchmarks.accuracy.published import published
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.tables import Table, tables
from offline_search.report.markdown import table as markdown_table

_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
            **{sign: f"\\{sign}" for sign in "&%$#_{}"}}  # fmt: skip

_FEW = 20
"""Images below which a bootstrap over them says too little."""

_NOTES = (
    "Acc. is the mean over benchmarks, MME divided by {divisor:g} first. Rel. is told by both "
    "definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over benchmarks "
    "of a score over the full model's.",
    "Differences are paired on the same questions; in brackets the 95 % interval, {images} images "
    "resampled. An interval that holds 0 does not tell the two apart. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K.",
)


def as_markdown(report: Report) -> str:
    """Verdict, tables, and what the columns mean."""
    return "\n".join(_markdown(report)) + "\n"


def as_latex(report: Report) -> str:
    """Every table in ``booktabs``; the verdict stands above them as a comment."""
    return "\n".join(_latex(report)) + "\n"


def verdict(report: Report) -> Iterator[str]:
    """Whether the figures may be believed, and everything against it."""
    yield "valid" if report.valid else "NOT VALID"
    yield from (f"- {reason}" for reason in report.reasons)


def every_table(report: Report) -> Iterator[Table]:
    """Ours, then ours beside the published."""
    if report.rows:
        yield from tables(report)
        yield from beside(report, published())


def _markdown(report: Report) -> Iterator[str]:
    opened = report.opened
    yield f"# Accuracy: {opened.suite}"
    yield ""
    yield f"Model: {opened.model}. Data: {opened.data}. Scored by {opened.scorer}."
    yield f"{report.questions:,} questions about {report.images:,} images, the same in every row."
    yield ""
    yield "Verdict: " + "\n".join(verdict(report))
    for found in every_table(report):
        yield ""
        yield f"## {found.title}"
        yield ""
        align = "l" * found.left + "r" * (len(found.head) - found.left)
        yield from markdown_table(list(found.head), [list(row) for row in found.rows], align)
    if report.rows:
        yield ""
        for note in _NOTES:
            yield "- " + note.format(divisor=opened.mme_divisor, images=f"{report.images:,}")
        if report.images < _FEW:
            yield f"- Fewer than {_FEW} images: intervals are too narrow to be quoted."


def _latex(report: Report) -> Iterator[str]:
    opened = report.opened
    yield f"% {opened.suite}: {opened.model}; {opened.data}; {opened.scorer}"
    yield from (f"% {line}" for line in verdict(report))
    for found in every_table(report):
        columns = "l" * found.left + "r" * (len(found.head) - found.left)
        yield ""
        yield r"\begin{table}[t]"
        yield r"\centering"
        yield f"\\caption{{{_escaped(found.title)}}}"
        yield f"\\begin{{tabular}}{{{columns}}}"
        yield r"\toprule"
        yield _line(found.head)
        yield r"\midrule"
        yield from (_line(row) for row in found.rows)
        yield r"\bottomrule"
        yield r"\end{tabular}"
        yield r"\end{table}"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(_escaped(cell) for cell in cells) + r" \\"


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(sign, sign) for sign in text)
