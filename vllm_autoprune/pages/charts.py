"""Charts of report pages as SVG: points with intervals, lines, steps and reference lines.

Colours come from the page's style sheet, so that they follow its light or dark mode. Every point
has a tooltip, also without JavaScript; the page's script shows it at once and hides a series whose
legend entry is clicked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from vllm_autoprune.pages.axes import Axis, Scale, fit_axis
from vllm_autoprune.pages.environment import page_environment

WIDTH, HEIGHT = 480.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 30.0, 44.0
_APART = 5.0
"""Distance of series that stand side by side."""
_CHARACTER = 9.0
"""Width of a tick label's character on a phone, where text is larger than the chart."""

Line = Literal["none", "straight", "steps"]


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
    line: Line = "straight"
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True)
class Rule:
    """A horizontal reference line; the legend has its name, where no data can run through it."""

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
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_zero: bool = False
    y_zero: bool = False
    y_most: float = math.inf
    x_names: Mapping[float, str] = field(default_factory=dict)
    """Names of places along the x axis, in place of numbers."""
    side_by_side: bool = False
    """Whether series are drawn a little apart, so that intervals at one x do not overlap."""


def draw_chart(chart: Chart) -> Markup:
    """The chart as a ``<figure>``: title, legend, SVG."""
    frame = _fit_frame(chart)
    series = [
        {
            "name": one.name,
            "colour": one.colour % 6,
            "dashed": one.dashed,
            "lines": _draw_lines(one, frame, shift),
            "marks": [_place_mark(mark, frame, shift) for mark in one.marks if frame.shows(mark)],
        }
        for one, shift in zip(chart.series, _shift_series(chart), strict=True)
    ]
    return Markup(
        _FIGURE.render(
            chart=chart,
            series=series,
            rules=[(rule, frame.y(rule.y)) for rule in chart.rules],
            x_ticks=_thin_out((name, frame.x(tick)) for name, tick in _x_ticks(chart, frame)),
            y_ticks=[(name, frame.y(tick)) for name, tick in frame.up.labelled_ticks()],
            width=WIDTH,
            height=HEIGHT,
            left=_LEFT,
            right=WIDTH - _RIGHT,
            top=_TOP,
            bottom=HEIGHT - _BOTTOM,
        )
    )


def _shift_series(chart: Chart) -> list[float]:
    """How far each series is moved to the right."""
    middle = (len(chart.series) - 1) / 2
    apart = _APART if chart.side_by_side else 0.0
    return [apart * (number - middle) for number in range(len(chart.series))]


def _thin_out(ticks: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Labels of the x axis without those that would run into the one before."""
    kept: list[tuple[str, float]] = []
    for name, x in sorted(ticks, key=lambda tick: tick[1]):
        if not kept or x - kept[-1][1] > _CHARACTER * (1 + (len(name) + len(kept[-1][0])) / 2):
            kept.append((name, x))
    return kept


@dataclass(frozen=True)
class _Frame:
    """The two axes, and where they put a value."""

    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * self.across.share(value)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * self.up.share(value)

    def shows(self, mark: Mark) -> bool:
        """Whether a point has a place on both axes; 0 has none on a logarithmic axis."""
        return self.has_place(mark.x, mark.y)

    def has_place(self, x: float, y: float) -> bool:
        pairs = ((x, self.across), (y, self.up))
        return all(math.isfinite(v) and (v > 0 or axis.scale != "log") for v, axis in pairs)


def _fit_frame(chart: Chart) -> _Frame:
    marks = [mark for one in chart.series for mark in one.marks]
    points = [point for one in chart.series for point in one.path]
    across = [mark.x for mark in marks] + [x for x, _ in points] + list(chart.x_names)
    up = [mark.y for mark in marks] + [y for _, y in points] + [rule.y for rule in chart.rules]
    up += [end for mark in marks for end in (mark.low, mark.high) if end is not None]
    return _Frame(
        fit_axis(across, chart.x_scale, zero=chart.x_zero),
        fit_axis(up, chart.y_scale, zero=chart.y_zero, most=chart.y_most),
    )


def _x_ticks(chart: Chart, frame: _Frame) -> list[tuple[str, float]]:
    if chart.x_names:
        return [(name, place) for place, name in chart.x_names.items()]
    return frame.across.labelled_ticks()


def _draw_lines(series: Series, frame: _Frame, shift: float) -> list[tuple[str, bool]]:
    """SVG paths, each with whether it is pale: one through all points, one through solid ones."""
    points = list(series.path) or [(mark.x, mark.y) for mark in series.marks]
    if series.line == "none" or len(points) < 2:
        return []
    solid = list(series.path) or [(mark.x, mark.y) for mark in series.marks if not mark.hollow]
    paths = [(solid, False)] if solid == points else [(points, True), (solid, False)]
    return [
        (_draw_path(own, series.line, frame, shift), pale) for own, pale in paths if len(own) > 1
    ]


def _draw_path(
    points: Sequence[tuple[float, float]], line: Line, frame: _Frame, shift: float
) -> str:
    places = [(frame.x(x) + shift, frame.y(y)) for x, y in points if frame.has_place(x, y)]
    if not places:
        return ""
    first, *others = places
    form = "H{:.1f}V{:.1f}" if line == "steps" else "L{:.1f} {:.1f}"
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(form.format(x, y) for x, y in others)


def _place_mark(mark: Mark, frame: _Frame, shift: float) -> dict[str, object]:
    bar = None
    if mark.low is not None and mark.high is not None and frame.has_place(mark.x, mark.low):
        bar = (frame.y(mark.low), frame.y(mark.high))
    return {"mark": mark, "x": frame.x(mark.x) + shift, "y": frame.y(mark.y), "bar": bar}


_FIGURE = page_environment().get_template("chart.html.jinja")
