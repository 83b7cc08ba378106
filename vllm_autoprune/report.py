"""Reports: tables, charts and the document that holds them, as Markdown and as one HTML file.

The HTML file loads nothing and runs no script: its content security policy forbids both. Charts are
SVG of matplotlib, with the colours of the page's style sheet, so that they follow its light or dark
mode; a point's tooltip is its SVG title.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform

Tone = Literal["good", "bad", "open"]
"""How an answer is marked; ``open``: not decided."""

CellTone = Literal["", "good", "bad"]
_Scale = Literal["linear", "log"]

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


def _cells(table: Table) -> Iterator[list[Cell]]:
    """Rows of cells; an interval in brackets stands under its figure."""
    for row in table.rows:
        yield [
            cell if isinstance(cell, Cell)
            else Cell(match["figure"] + match["mark"], match["interval"])
            if column >= table.left and (match := _WITH_INTERVAL.fullmatch(cell))
            else Cell(cell)
            for column, cell in enumerate(row)
        ]  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """One point; ``low`` and ``high``: its interval; hollow where it is not to be relied on."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    link: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour; ``path``: points of a line without marks."""

    name: str
    marks: Sequence[Mark] = ()
    path: Sequence[tuple[float, float]] = ()
    line: Literal["none", "straight", "steps"] = "straight"
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True)
class Rule:
    """A horizontal reference line; the legend has its name."""

    y: float
    name: str


@dataclass(frozen=True)
class Chart:
    """A chart with its title and the labels of its axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    rules: Sequence[Rule] = ()
    x_scale: _Scale = "linear"
    y_scale: _Scale = "linear"
    x_zero: bool = False
    """Whether a linear axis includes 0."""
    y_zero: bool = False
    y_most: float = math.inf
    """A value that none can exceed: the axis ends there."""
    x_names: Mapping[float, str] = field(default_factory=dict)
    """Names of places along the x axis, in place of numbers."""
    side_by_side: bool = False
    """Whether series are drawn a little apart, so that intervals at one x do not overlap."""


@dataclass(frozen=True)
class Details:
    """An entry that is folded to its summary."""

    summary: str
    texts: Sequence[str] = ()
    items: Sequence[str] = ()
    code: str = ""
    name: str = ""
    """What links to it refer to, as ``#name``."""


@dataclass(frozen=True)
class Section:
    """A titled part of a document."""

    title: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    entries: Sequence[Details] = ()
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


def render_document(document: Document) -> str:
    """The HTML file; whatever it is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    text = template.render(
        document=document,
        draw_chart=draw_chart,
        cells=_cells,
        breakable=lambda text: Markup(_JOINT.sub("<wbr>", escape(text))),
    )
    return text + "\n"


def render_markdown(document: Document) -> str:
    """The document without its charts and entries."""
    lines = [f"# {document.title}\n", f"{document.answer}\n"]
    lines += [*(f"- {text}" for text in document.warnings), ""] if document.warnings else []
    lines += [f"- {fact}" for fact in document.facts]
    for section in document.sections:
        if section.charts and not section.tables:
            continue
        lines.append(f"\n## {section.title}\n")
        lines += [f"- {text}" for text in section.texts]
        lines += [f"\n### {table.caption}\n\n{table.markdown()}" for table in section.tables]
    return "\n".join(lines) + "\n"


_SVG = "http://www.w3.org/2000/svg"
_STYLE = {
    "#000001": "var(--ink)", "#000002": "var(--soft)", "#000003": "var(--line)",
    "#0072b2": "var(--c0)", "#d55e00": "var(--c1)", "#009e73": "var(--c2)",
    "#b4548f": "var(--c3)", "#b07a00": "var(--c4)", "#3b9bd3": "var(--c5)",
}  # fmt: skip
"""Colours as they are drawn, by which the style sheet's are told apart in the SVG."""
_INK, _SOFT, _LINE, *_COLOURS = _STYLE
_SYMBOLS = "os^DvP"
_APART = 5.0
"""Points between series that stand side by side."""


def draw_chart(chart: Chart) -> Markup:
    """The chart as a ``<figure>``: title, then an SVG with its legend."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.transforms import ScaledTranslation
    except ModuleNotFoundError:
        return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(
            chart.title, "Not drawn: pip install matplotlib"
        )
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": chart.title, "text.parse_math": False,
        "axes.edgecolor": _SOFT, "axes.labelcolor": _INK, "text.color": _INK, "grid.color": _LINE,
        "xtick.color": _SOFT, "ytick.color": _SOFT, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "legend.frameon": False,
    }  # fmt: skip
    tips: dict[str, Mark] = {}
    buffer = io.StringIO()
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that a font lacks, which a browser has
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.add_subplot(xlabel=chart.x_label, ylabel=chart.y_label)
        middle = (len(chart.series) - 1) / 2
        for number, series in enumerate(chart.series):
            shift = _APART * (number - middle) if chart.side_by_side else 0.0
            place = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
            _draw_series(axes, series, place, tips)
        for rule in chart.rules:
            axes.axhline(rule.y, color=_INK, linestyle=":", label=rule.name)
        _scale_axes(axes, chart)
        if len(chart.series) > 1 or chart.rules:
            figure.legend(loc="outside upper left", ncols=3, fontsize="small")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        if mark := tips.get(element.get("id", "")):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = mark.tip
            element.insert(0, title)
            if mark.link:
                element.tag = f"{{{_SVG}}}a"
                element.set("href", mark.link)
    for name in ("width", "height"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", f"{chart.title}: {chart.y_label} over {chart.x_label}")
    svg = re.sub("|".join(_STYLE), lambda c: _STYLE[c[0]], ElementTree.tostring(root, "unicode"))
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>').format(
        chart.title, Markup(svg)
    )


def _draw_series(axes: Axes, series: Series, place: Transform, tips: dict[str, Mark]) -> None:
    """Lines and intervals of a series, and its marks, whose tips get the ids they have in the SVG.

    Of a series with hollow points, the line through all of them is pale, that without them solid.
    """
    colour = _COLOURS[series.colour % len(_COLOURS)]
    symbol, size = _SYMBOLS[series.colour % len(_SYMBOLS)], 4 if series.dashed else 6
    steps = "steps-post" if series.line == "steps" else "default"
    dashes = "--" if series.dashed else "-"
    points = list(series.path) or [(mark.x, mark.y) for mark in series.marks]
    solid = list(series.path) or [(mark.x, mark.y) for mark in series.marks if not mark.hollow]
    if series.line != "none":
        if solid != points:
            axes.plot(
                *zip(*points, strict=True), ":", color=colour, linewidth=1, drawstyle=steps,
                transform=place,
            )  # fmt: skip
        if len(solid) > 1:
            axes.plot(
                *zip(*solid, strict=True), dashes, color=colour, drawstyle=steps, transform=place
            )
    for mark in series.marks:
        name = f"mark-{len(tips)}"
        tips[name] = mark
        if mark.low is not None and mark.high is not None:
            ends = (mark.low, mark.high)
            axes.plot([mark.x] * 2, ends, color=colour, linewidth=1.2, alpha=0.65, transform=place)
        axes.plot(
            [mark.x], [mark.y], symbol, color=colour, markersize=size, transform=place, gid=name,
            fillstyle="none" if mark.hollow else "full",
        )  # fmt: skip
    # What the legend shows.
    axes.plot(
        [], [], "" if series.line == "none" or len(points) < 2 else dashes, color=colour,
        label=series.name, marker=symbol if series.marks else "", markersize=size,
    )  # fmt: skip


def _scale_axes(axes: Axes, chart: Chart) -> None:
    points = [point for series in chart.series for point in series.path]
    marks = [mark for series in chart.series for mark in series.marks]
    points += [(mark.x, mark.y) for mark in marks]
    points += [(mark.x, end) for mark in marks for end in (mark.low, mark.high) if end is not None]
    # Not found by matplotlib itself, as series are drawn with transforms of their own.
    axes.update_datalim(points)
    if chart.x_scale == "log" and any(x > 0 for x, _ in points):
        axes.set_xscale("log")
    if chart.y_scale == "log" and any(y > 0 for _, y in points):
        axes.set_yscale("log")
    axes.autoscale_view()
    if chart.x_zero and chart.x_scale == "linear":
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    if chart.y_zero and chart.y_scale == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if axes.get_ylim()[1] > chart.y_most:
        axes.set_ylim(top=chart.y_most)
    if chart.x_names:
        names = list(chart.x_names.values())
        axes.set_xticks(list(chart.x_names), names, rotation=45 if len(names) > 8 else 0)
        axes.minorticks_off()
