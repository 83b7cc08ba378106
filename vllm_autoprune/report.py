"""Reports: tables and the document that holds them, as Markdown and as one HTML file.

The HTML file loads nothing and runs no script: its content security policy forbids both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jinja2
from markupsafe import Markup, escape

Tone = Literal["good", "bad", "open"]
"""How an answer is marked; ``open``: not decided."""
CellTone = Literal["", "good", "bad"]

_WITH_INTERVAL = re.compile(r"(?P<figure>[+\-−]?\d[^()]*?) \((?P<interval>[^()]+)\)(?P<mark>†?)")
_JOINT = re.compile(r"(?<=[a-z][_./])(?=[a-z]{2})")
"""Where a long name may be broken on a narrow screen."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a figure and, in small print under it, its interval."""

    text: str
    under: str = ""
    link: str = ""
    tone: CellTone = ""
    image: str = ""
    """A data URL of what is shown above the text."""

    def __str__(self) -> str:
        return f"{self.text} ({self.under})" if self.under else self.text


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """Caption, column names and rows; ``align`` has ``l`` or ``r`` for each column, from the first.

    Columns without a letter hold figures, but for the first one.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    align: str = ""
    folded: bool = False
    """Whether the caption of a page's table has to be clicked to show the rows."""

    @property
    def left(self) -> int:
        """How many columns are text and aligned left, before those that are figures."""
        return len(self.align) - len(self.align.lstrip("l-")) or 1

    def markdown(self) -> str:
        """The table without its caption; ``|`` within cells is escaped."""
        sides = self.align.ljust(len(self.columns), "-")
        rule = [{"l": ":--", "r": "--:"}.get(side, "---") for side in sides]
        rows = [[str(cell).replace("|", "\\|") for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in (list(self.columns), rule, *rows))

    def cells(self) -> Iterator[list[Cell]]:
        """Rows of the page's table: an interval in brackets stands under its figure."""
        for row in self.rows:
            cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
            for column, cell in enumerate(cells[self.left :], self.left):
                if match := _WITH_INTERVAL.fullmatch(cell.text):
                    text, under = match["figure"] + match["mark"], match["interval"]
                    cells[column] = replace(cell, text=text, under=under)
            yield cells


@dataclass(frozen=True)
class Section:
    """A titled part of a document."""

    title: str
    texts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    answer: str
    """One sentence that says what came out."""
    tone: Tone
    warnings: Sequence[str] = ()
    """What limits the answer, each in a sentence."""
    facts: Sequence[str] = ()
    """What was measured, in short phrases."""
    sections: Sequence[Section] = ()

    def render_html(self) -> str:
        """The HTML file; whatever it is given is escaped."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.get_template("report.html.jinja").render(
            document=self,
            breakable=lambda text: Markup(_JOINT.sub("<wbr>", escape(text))),
        )

    def render_markdown(self) -> str:
        """The document, without the code of its sections."""
        lines = [f"# {self.title}\n", f"{self.answer}\n"]
        lines += [*(f"- {text}" for text in self.warnings), ""] if self.warnings else []
        lines += [f"- {fact}" for fact in self.facts]
        for section in self.sections:
            lines.append(f"\n## {section.title}\n")
            lines += [f"- {text}" for text in section.texts]
            for table in section.tables:
                lines.append(f"\n### {table.caption}\n\n{table.markdown()}")
        return "\n".join(lines) + "\n"
