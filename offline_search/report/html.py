"""HTML report: one self-contained page without scripts or external resources.

The template escapes everything that a proposer wrote, and the page's content security policy
forbids scripts as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from offline_search.report import markdown
from offline_search.report.markdown import format_percent
from offline_search.report.search_report import CandidateRow, SearchReport
from vllm_autoprune.tpdsl.states.differences import Change

_WIDTH, _LEFT, _BOTTOM, _HEIGHT = 920, 60, 280, 250


def as_html(report: SearchReport) -> str:
    """The whole page."""
    others = [row for row in report.rows if row not in report.ranked]
    return _template().render(
        report=report,
        chart=_draw_chart(report),
        tables=markdown,
        candidates=[*report.ranked, *others],
        describe_result=_describe_result,
        describe_change=_describe_change,
        to_json=lambda value: json.dumps(value, indent=1),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")


@dataclass(frozen=True)
class _Dot:
    x: float
    y: float
    status: str
    label: str


@dataclass(frozen=True)
class _Chart:
    """Objective over answers spent: candidates as dots, the best so far as a step curve."""

    dots: tuple[_Dot, ...]
    path: str
    low: float
    high: float
    answers: int


def _draw_chart(report: SearchReport) -> _Chart | None:
    measured = [
        (row, row.result.objective) for row in report.rows if row.result.objective is not None
    ]
    if not measured:
        return None
    answers = max(row.spent for row, _ in measured)
    values = sorted(value for _, value in measured)
    # The axis starts at the lowest decile, so that a few very poor candidates do not flatten it.
    low, high = values[len(values) // 10], values[-1]

    def position(spent: int, value: float) -> tuple[float, float]:
        height = (max(value, low) - low) / ((high - low) or 1.0)
        return _LEFT + _WIDTH * spent / answers, _BOTTOM - _HEIGHT * height

    dots = tuple(
        _Dot(
            *position(row.spent, value),
            row.result.status,
            f"{row.name}: {value:+.4f} ({row.result.status})",
        )
        for row, value in measured
    )
    path = _draw_steps([position(spent, value) for spent, value in report.curve()])
    return _Chart(dots, path, low, high, answers)


def _draw_steps(points: Sequence[tuple[float, float]]) -> str:
    """SVG path of a step curve through points, prolonged to the right edge."""
    if not points:
        return ""
    x, y = points[0]
    steps = " ".join(f"H{x:.1f} V{y:.1f}" for x, y in points[1:])
    return f"M{x:.1f} {y:.1f} {steps} H{_LEFT + _WIDTH}"


def _describe_result(row: CandidateRow) -> str:
    """One line on a candidate: its origin and its result."""
    result = row.result
    if result.same_as:
        outcome = f"keeps the same tokens as {result.same_as}"
    elif result.objective is None:
        outcome = f"{result.status} {result.reason}".strip()
    else:
        scores = (("", result.accuracy), ("+", result.accuracy_plus))
        shares = [f"accuracy{sign} {format_percent(v)} %" for sign, v in scores if v is not None]
        figures = [f"objective {result.objective:+.4f}", *shares, f"{result.examples} answers"]
        outcome = ", ".join(figures)
        if result.status != "evaluated":
            outcome = f"{result.status} after {outcome} {result.reason}".strip()
    return f"{row.name} by {row.proposal.origin}: {outcome}"


def _describe_change(change: Change) -> str:
    before, after = json.dumps(change.before), json.dumps(change.after)
    return f"{change.where} {change.kind}: {before} -> {after}"
