"""The table as Markdown and JSON, and its place in ``docs/accuracy.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy.yardsticks.cases import FULL
from benchmarks.accuracy.yardsticks.table import Row
from vllm_autoprune.pages.table import Table
from vllm_autoprune.statistics import Estimate

_MAX_CATEGORY_COLUMNS = 3
"""With more categories, the table by kind has to do."""

BEGIN, END = "<!-- yardsticks -->", "<!-- /yardsticks -->"


@dataclass(frozen=True)
class Measured:
    """The rows of one yardstick, its model, and the state that is the default on it."""

    name: str
    model: str
    default: str
    detailed_budget: str
    """The budget whose differences are shown for every kind of question."""
    rows: Sequence[Row]


def as_json(measured: Sequence[Measured]) -> str:
    """All rows, also those by kind at every budget."""
    return json.dumps([asdict(one) for one in measured], indent=1)


def as_markdown(measured: Sequence[Measured]) -> str:
    """A verdict on each default state, and the tables of every yardstick."""
    lines: list[str] = []
    for one in measured:
        overall = [row for row in one.rows if row.category is None and row.kind is None]
        first = overall[0]
        lines += [f"### {one.name}", ""]
        lines.append(
            f"{one.model}; {first.questions} questions about {first.images} images of the test "
            f"split. With all tokens ({first.tokens:.1f} on average) {format_share(first.accuracy)}"
            " are right."
        )
        lines += ["", *_default_lines(one), ""]
        for budget in dict.fromkeys(row.budget for row in overall if row.name != FULL):
            lines += [f"#### {one.name}, {budget}", "", _budget_table(one, budget).markdown(), ""]
        lines += [f"#### {one.name}, {one.detailed_budget}, by kind: less the resize control", ""]
        lines += [_kinds_table(one).markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _default_lines(measured: Measured) -> Iterator[str]:
    """Where the default state is better than resizing, and where it is not."""
    for row in measured.rows:
        if row.name != measured.default or row.kind is not None or row.less_resized is None:
            continue
        if row.category is not None and row.budget != measured.detailed_budget:
            continue
        part = row.category or "all questions"
        verdict = "not decided"
        if row.less_resized.low > 0:
            verdict = f"`{row.name}` is better than resizing"
        elif row.less_resized.high < 0:
            verdict = f"resizing is better than `{row.name}`"
        yield f"- {row.budget}, {part}: {format_difference(row.less_resized)}; {verdict}"


def _budget_table(measured: Measured, budget: str) -> Table:
    rows = [row for row in measured.rows if row.budget == budget and row.kind is None]
    overall = {row.name: row for row in rows if row.category is None}
    categories = list(dict.fromkeys(row.category for row in rows if row.category is not None))
    if len(categories) > _MAX_CATEGORY_COLUMNS:
        categories = []
    columns = (
        "method", "question", "tokens", "% right", "less resized", "less base", "less default",
        *(f"{category}, less resized" for category in categories),
    )  # fmt: skip
    cells = []
    for name, row in overall.items():
        own = {one.category: one for one in rows if one.name == name}
        cells.append((
            f"**{name}**" if name == measured.default else name,
            {True: "read", False: "not read", None: ""}[row.reads_question],
            f"{row.tokens:.1f}",
            f"{row.accuracy.value:.1f}",
            format_difference(row.less_resized),
            format_difference(row.less_base),
            format_difference(row.less_default),
            *(_category_cell(own[category]) for category in categories),
        ))  # fmt: skip
    return Table("", columns, cells, "--" + "r" * (len(columns) - 2))


def _kinds_table(measured: Measured) -> Table:
    rows = [row for row in measured.rows if row.budget == measured.detailed_budget and row.kind]
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind is not None))
    names = list(dict.fromkeys(row.name for row in rows))
    cells = []
    for name in names:
        own = {row.kind: row for row in rows if row.name == name}
        figures = [
            f"{own[kind].accuracy.value:.0f}"
            if own[kind].less_resized is None
            else format_difference(own[kind].less_resized, 0)
            for kind in kinds
        ]
        cells.append((name, *figures))
    return Table("", ("method", *kinds), cells, "-" + "r" * len(kinds))


def _category_cell(row: Row) -> str:
    figure = f"{row.accuracy.value:.1f}"
    return f"{figure}; {format_difference(row.less_resized)}" if row.less_resized else figure


def format_share(share: Estimate) -> str:
    """Per cent with its interval."""
    return f"{share.value:.1f} % ({share.low:.1f} to {share.high:.1f})"


def format_difference(difference: Estimate | None, digits: int = 1) -> str:
    """A difference with its interval; a dash where there is none."""
    if difference is None:
        return "-"
    figures = (difference.value, difference.low, difference.high)
    value, low, high = (f"{figure:+.{digits}f}" for figure in figures)
    return f"{value} ({low} to {high})"


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the markers of a document."""
    document = path.read_text(encoding="utf-8")
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
