"""Tables of reports: rows of text, as Markdown, and with cells of their own as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

CellTone = Literal["", "good", "bad"]

_WITH_INTERVAL = re.compile(r"(?P<figure>[+\-−]?\d[^()]*?) \((?P<interval>[^()]+)\)(?P<mark>†?)")


@dataclass(frozen=True)
class Table:
    """Caption, column names and rows of text; ``align`` has ``l`` or ``r`` for each column."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""

    def markdown(self) -> str:
        """The table without its caption; ``|`` within cells is escaped."""
        sides = self.align or "-" * len(self.columns)
        rule = [{"l": ":--", "r": "--:"}.get(side, "---") for side in sides]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in (list(self.columns), rule, *rows))


@dataclass(frozen=True)
class Cell:
    """One cell of a page's table: a figure and, in small print under it, its interval."""

    text: str
    under: str = ""
    link: str = ""
    tone: CellTone = ""


PageRow = Sequence[Cell | str]


@dataclass(frozen=True)
class PageTable:
    """A table of a page; the first ``left`` columns are text, the others figures."""

    columns: Sequence[str]
    rows: Sequence[PageRow]
    left: int = 1
    caption: str = ""
    folded: bool = field(default=False)
    """Whether the caption has to be clicked to show the rows."""


def as_page_table(table: Table, left: int = 1) -> PageTable:
    """The same table with intervals, such as ``1.2 (1.1 to 1.3)``, under their figures."""
    left = len(table.align) - len(table.align.lstrip("l")) if table.align else left
    rows = [[split_interval(cell) for cell in row] for row in table.rows]
    return PageTable(table.columns, rows, left, table.caption)


def split_interval(text: str) -> Cell:
    """A figure with its interval in brackets as a cell; any other text as it is."""
    match = _WITH_INTERVAL.fullmatch(text)
    if match is None:
        return Cell(text)
    return Cell(match["figure"] + match["mark"], match["interval"])
