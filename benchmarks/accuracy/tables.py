"""Tables of the accuracy page, made of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.rows import Row
from benchmarks.common.report import format_estimate
from benchmarks.policies import SOURCE
from benchmarks.yardsticks.yardstick import Yardstick
from vllm_autoprune.report import Table

UPON = f"{SOURCE} upon "
"""Beginning of the name of a case that exchanges tokens as the released state does."""

_SPLITS = ("shared-core", "pivoted_qr-split", "minillava-split")
"""Forms of other states of the table, whose figures are among the shipped states."""

_BY_KIND = (2, ("cen_divprune", "divprune", "cdpruner", "minillava"))
"""Divisor of N, and the states, in the table of positions by kind of question."""
_LEAST_CHANGE = 10.0
"""Points by which one of the states has to change in a kind that is listed."""


def tabulate_accuracy(
    yardstick: Yardstick, rows: Sequence[Row], split: str = "test"
) -> str:
    """Table of all cases except splits, and variants compared with another case of their state.

    States that a search found are in bold, and those that read the question have an asterisk. Cells
    have per cent right, and those of the last column points above resizing at the last budget but
    one, N/8, ± the longer side of the interval.
    """
    full = next(row for row in rows if row.name == "full")
    images = f"{full.images} images of the {split} split"
    accuracy = format_estimate(full.accuracy, between=" to ").replace(" (", " % (")
    compared = yardstick.budgets[-2:][0].label
    gain = f"{compared}: less resized"
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        is_listed = row is not full and row.name not in _SPLITS
        if is_listed and row.category is None and "@" not in row.name:
            label = (
                f"**{row.name}**" if row.name == yardstick.search_result else row.name
            )
            if row.reads_question:
                label += r"\*"
            method = cells.setdefault(row.name, {"method": label})
            method[row.budget] = f"{row.accuracy.value:.1f}"
            if row.budget == compared and (more := row.less_resized):
                width = max(more.high - more.value, more.value - more.low)
                method[gain] = f"{more.value:+.1f}±{width:.1f}"
    columns = ("method", *(budget.label for budget in yardstick.budgets), gain)
    table = [
        [method.get(column, "-") for column in columns] for method in cells.values()
    ]
    return (
        f"### {yardstick.name}\n\n{yardstick.model}; {full.questions} questions about {images}. "
        f"With all tokens ({full.tokens:.1f} on average) {accuracy} are right.\n\n"
        f"{Table('', columns, table, '-rrrrr').markdown()}\n"
    )


def tabulate_positions(yardstick: Yardstick, rows: Sequence[Row]) -> str:
    """Per cent right of a few states by kind of question, with packed and with true positions."""
    number, states = _BY_KIND
    label = yardstick.budgets[number].label
    by_kind: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.budget == label and (row.kind or row.category is None):
            by_kind.setdefault(row.kind or "all", {})[row.name] = row.accuracy.value
    table = []
    for kind, by_name in by_kind.items():
        pairs = [(by_name[f"{name}@packed"], by_name[name]) for name in states]
        most = max(abs(true - packed) for packed, true in pairs)
        if kind == "all" or most >= _LEAST_CHANGE:
            cells = (f"{packed:.1f}→{true:.1f}" for packed, true in pairs)
            table.append([kind, *cells])
    columns = (f"{yardstick.name}, {label}", *(f"`{name}`" for name in states))
    return Table("", columns, table, "-" + "r" * len(states)).markdown() + "\n"


def tabulate_gains(rows: Sequence[Row], heading: str) -> str:
    """Points that every case gains upon the one it is compared with, with their intervals."""
    columns = dict.fromkeys(
        f"{row.yardstick}, {row.budget}" for row in rows if row.less_base is not None
    )
    gains: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.less_base is not None and row.category is None:
            name = row.name.removeprefix(UPON)
            gains.setdefault(name, {})[f"{row.yardstick}, {row.budget}"] = (
                format_estimate(row.less_base, between=" to ")
            )
    table = [
        [f"`{name}`", *(by_column.get(column, "-") for column in columns)]
        for name, by_column in gains.items()
    ]
    return Table("", [heading, *columns], table).markdown() + "\n"


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Write each part of a page between ``<!-- name -->`` and ``<!-- /name -->``."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        head, begin, tail = text.partition(f"<!-- {name} -->\n")
        _, end, tail = tail.partition(f"<!-- /{name} -->")
        text = f"{head}{begin}\n{part}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")
