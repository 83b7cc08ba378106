"""The rows as CSV and JSON, and as a table in ``docs/accuracy.md``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy.yardsticks.cases import BEFORE
from benchmarks.accuracy.yardsticks.table import Row
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate

_ESTIMATES = ("accuracy", "less_resized", "less_base", "less_default")

BEGIN, END = "<!-- yardsticks -->", "<!-- /yardsticks -->"


@dataclass(frozen=True)
class Measured:
    """The rows of one yardstick, its model, and the state that is the default on it."""

    name: str
    model: str
    default: str
    detailed_budget: str
    """The budget whose verdicts are given for every category of questions."""
    rows: Sequence[Row]


def as_json(measured: Sequence[Measured]) -> str:
    """All rows, also those by kind at every budget."""
    return json.dumps([asdict(one) for one in measured], indent=1)


def as_csv(measured: Sequence[Measured]) -> str:
    """All rows, one a line; an estimate is three columns, its 95 % interval ``low`` to ``high``."""
    records = [_flat_row(row) for one in measured for row in one.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _flat_row(row: Row) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in asdict(row).items():
        if name in _ESTIMATES:
            value = value or dict.fromkeys(("value", "low", "high"))
            flat |= {
                name: value["value"],
                f"{name}_low": value["low"],
                f"{name}_high": value["high"],
            }
        else:
            flat[name] = value[:12] if name == "digest" else value
    return flat


def as_markdown(measured: Sequence[Measured]) -> str:
    """A verdict on each default state, and one table of every yardstick."""
    lines: list[str] = []
    for one in measured:
        overall = [row for row in one.rows if row.category is None and row.kind is None]
        full = overall[0]
        lines += [f"### {one.name}", ""]
        lines.append(
            f"{one.model}; {full.questions} questions about {full.images} images of the test "
            f"split. With all tokens ({full.tokens:.1f} on average) {format_share(full.accuracy)}"
            " are right."
        )
        lines += ["", *_default_lines(one), "", _table(one, overall[1:]).markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(measured: Measured, rows: Sequence[Row]) -> Table:
    """Per cent right at every budget, and points more than resizing; no rows before the merger."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    cells = []
    for name in dict.fromkeys(row.name for row in rows if not row.name.endswith(BEFORE)):
        at = {row.budget: row for row in rows if row.name == name}
        question = {True: "read", False: "not read", None: ""}[
            next(iter(at.values())).reads_question
        ]
        label = f"**{name}**" if name == measured.default else name
        cells.append((label, question, *(_figures(at.get(budget)) for budget in budgets)))
    return Table("", ("method", "question", *budgets), cells, "--" + "r" * len(budgets))


def _figures(row: Row | None) -> str:
    if row is None:
        return "-"
    figure, more = f"{row.accuracy.value:.1f}", row.less_resized
    if more is None:
        return figure
    return f"{figure} {more.value:+.1f}±{max(more.high - more.value, more.value - more.low):.1f}"


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
