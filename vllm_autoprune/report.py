"""Reports: tables, charts and the document that holds them, as Markdown and as one HTML file.

The HTML file loads nothing and runs no script: its content security policy forbids both. Charts are
SVG of matplotlib, with the colours of the page's style sheet, so that they follow its light or dark
mode; a point's tooltip is its SVG title.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tone = Literal["good", "bad", "open"]
"""Tone of an answer; ``open`` means not decided."""
CellTone = Literal["", "good", "bad"]

_WITH_INTERVAL = re.compile(
    r"(?P<figure>[+\-−]?\d[^()]*?) \((?P<interval>[^()]+)\)(?P<mark>†?)"
)
_JOINT = re.compile(r"(?<=[a-z][_./])(?=[a-z]{2})")
"""Places where a long name may be broken on a narrow screen."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a figure and, in small print under it, its interval."""

    text: str
    under: str = ""
    link: str = ""
    tone: CellTone = ""
    image: str = ""
    """Data URL of an image shown above the text."""

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

    @property
    def left(self) -> int:
        """How many columns are text and aligned left, before those that are figures."""
        return len(self.align) - len(self.align.lstrip("l-")) or 1

    def markdown(self) -> str:
        """The table without its caption; ``|`` within cells is escaped."""
        sides = self.align.ljust(len(self.columns), "-")
        rule = [{"l": ":--", "r": "--:"}.get(side, "---") for side in sides]
        rows = [[str(cell).replace("|", "\\|") for cell in row] for row in self.rows]
        return "\n".join(
            f"| {' | '.join(row)} |" for row in (list(self.columns), rule, *rows)
        )

    def cells(self) -> Iterator[list[Cell]]:
        """Rows of the page's table: an interval in brackets stands under its figure."""
        for row in self.rows:
            cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
            for column, cell in enumerate(cells[self.left :], self.left):
                if match := _WITH_INTERVAL.fullmatch(cell.text):
                    text = match["figure"] + match["mark"]
                    under = match["interval"]
                    cells[column] = replace(cell, text=text, under=under)
            yield cells


@dataclass(frozen=True)
class Mark:
    """One point; ``low`` and ``high``: its interval; hollow where it is not to be relied on."""

    x: float
    y: float
    tip: str
    low: float
    high: float
    hollow: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one colour."""

    name: str
    marks: Sequence[Mark]
    dashed: bool = False
    colour: int = 0

    def draw(self, axes: Axes, marks: dict[str, Mark]) -> None:
        """A line through the points that are not hollow, and every mark by its id in the SVG."""
        colour = _COLOURS[self.colour % len(_COLOURS)]
        symbol = _SYMBOLS[self.colour % len(_SYMBOLS)]
        size = 4 if self.dashed else 6
        solid = [mark for mark in self.marks if not mark.hollow]
        dashes = "-" + "-" * self.dashed
        axes.plot(
            [mark.x for mark in solid], [mark.y for mark in solid], dashes, color=colour
        )
        for mark in self.marks:
            interval = [mark.low, mark.high]
            axes.plot([mark.x] * 2, interval, color=colour, linewidth=1.2, alpha=0.65)
            fill: Literal["none", "full"] = "none" if mark.hollow else "full"
            name = f"mark-{len(marks)}"
            marks[name] = mark
            axes.plot(
                mark.x,
                mark.y,
                symbol,
                color=colour,
                markersize=size,
                fillstyle=fill,
                gid=name,
            )
        # The legend shows the line with a mark, which the line itself does not have.
        axes.plot(
            [],
            [],
            dashes,
            color=colour,
            label=self.name,
            marker=symbol,
            markersize=size,
        )


def _label_logarithm(axes: Axes) -> None:
    """Write plain numbers at a logarithmic y axis, at least two of them."""
    from matplotlib import ticker

    bottom, top = axes.get_ylim()
    several = top / bottom > 10
    places = ticker.LogLocator(subs=(1, 2, 5)) if several else ticker.MaxNLocator(6)
    axes.yaxis.set_major_locator(places)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


@dataclass(frozen=True)
class Chart:
    """A chart with its title and the labels of its axes: x from 0, y logarithmic unless linear."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    rules: Mapping[str, float] = field(default_factory=dict)
    """Horizontal reference lines by their name in the legend."""
    linear: bool = False

    def draw(self) -> Markup:
        """The chart as a ``<figure>``: title, then an SVG with its legend."""
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(
                self.title, "Not drawn: pip install matplotlib"
            )
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": self.title,
            "text.parse_math": False,
            "axes.edgecolor": _SOFT,
            "axes.labelcolor": _INK,
            "text.color": _INK,
            "grid.color": _LINE,
            "xtick.color": _SOFT,
            "ytick.color": _SOFT,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "legend.frameon": False,
        }
        marks: dict[str, Mark] = {}
        buffer = io.StringIO()
        with matplotlib.rc_context(style), warnings.catch_warnings():
            # Matplotlib warns about characters that its font lacks; browsers have them.
            warnings.simplefilter("ignore")
            figure = Figure(figsize=(6.4, 4.4), layout="constrained")
            axes = figure.add_subplot(xlabel=self.x_label, ylabel=self.y_label)
            for series in self.series:
                series.draw(axes, marks)
            for name, y in self.rules.items():
                axes.axhline(y, color=_INK, linestyle=":", label=name)
            axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
            # A logarithmic axis needs a positive point.
            if not self.linear and any(mark.y > 0 for mark in marks.values()):
                axes.set_yscale("log")
                _label_logarithm(axes)
            if len(self.series) > 1 or self.rules:
                figure.legend(loc="outside upper left", ncols=3, fontsize="small")
            figure.savefig(
                buffer, format="svg", transparent=True, metadata={"Date": None}
            )
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        root = ElementTree.fromstring(buffer.getvalue())
        for element in root.iter():
            if mark := marks.get(element.get("id", "")):
                title = ElementTree.Element(f"{{{_SVG}}}title")
                title.text = mark.tip
                element.insert(0, title)
        for name in ("width", "height"):
            del root.attrib[name]
        root.set("role", "img")
        root.set("aria-label", f"{self.title}: {self.y_label} over {self.x_label}")
        svg = re.sub(
            "|".join(_STYLE),
            lambda c: _STYLE[c[0]],
            ElementTree.tostring(root, "unicode"),
        )
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption>{}</figure>'
        ).format(self.title, Markup(svg))


@dataclass(frozen=True)
class Section:
    """A titled part of a document."""

    title: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
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
        """The document without its charts."""
        lines = [f"# {self.title}\n", f"{self.answer}\n"]
        lines += [*(f"- {text}" for text in self.warnings), ""] if self.warnings else []
        lines += [f"- {fact}" for fact in self.facts]
        for section in self.sections:
            if section.charts and not (section.texts or section.tables):
                continue
            lines.append(f"\n## {section.title}\n")
            lines += [f"- {text}" for text in section.texts]
            for table in section.tables:
                lines.append(f"\n### {table.caption}\n\n{table.markdown()}")
        return "\n".join(lines) + "\n"


_SVG = "http://www.w3.org/2000/svg"
_STYLE = {
    "#000001": "var(--ink)",
    "#000002": "var(--soft)",
    "#000003": "var(--line)",
    "#0072b2": "var(--c0)",
    "#d55e00": "var(--c1)",
    "#009e73": "var(--c2)",
    "#b4548f": "var(--c3)",
    "#b07a00": "var(--c4)",
    "#3b9bd3": "var(--c5)",
}
"""Colours as they are drawn, by which the style sheet's are told apart in the SVG."""
_INK, _SOFT, _LINE, *_COLOURS = _STYLE
_SYMBOLS = "os^DvP"
