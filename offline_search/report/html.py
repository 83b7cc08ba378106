"""A reading as one HTML page that needs nothing else: no script, nothing fetched.

Knows nothing about ledgers. Whatever a proposer wrote is escaped, and the page's own policy keeps
a browser from running it in any case.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence

from offline_search.proposal import COMPONENTS
from offline_search.report.markdown import (
    FRONT,
    RESULT_HEAD,
    counted,
    front,
    percent,
    result_rows,
    spending,
)
from offline_search.report.reading import Reading, Row
from vllm_autoprune.tpdsl.states.differences import Change

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark: #2a7de1; --faint: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .7rem; text-align: left;
border-bottom: 1px solid var(--line) }
td.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: 18rem; border: 1px solid var(--line) } .faint { color: var(--faint) }
summary { cursor: pointer } pre { overflow-x: auto; font-size: 13px } circle { fill: var(--faint) }
circle.evaluated { fill: var(--mark) } path { fill: none; stroke: var(--mark); stroke-width: 2 }
text { font-size: 12px; fill: currentColor }
"""


def as_html(found: Reading) -> str:
    """The whole page."""
    settings = found.settings
    title = f"{settings.strategy} on {settings.base_policy}, K = {settings.source_budget}"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title>
<style>{_STYLE}</style>
<h1>{_safe(title)}</h1>
<p>{_safe(settings.evaluator)}; proposer {_safe(settings.proposer or "none")}; seed {settings.seed}
{"".join(_sections(found))}
</html>
"""


def _sections(found: Reading) -> Iterator[str]:
    yield "<h2>Result on the test split</h2>"
    yield _result(found)
    yield "<h2>Objective over answers spent</h2>"
    yield (
        "<p class=faint>Log-probability of the reference answer, less what the model gives it with "
        "all its tokens: 0 is as good as unpruned. A dot is a candidate, the line the best so far."
    )
    yield _chart(found)
    yield f"<p>{_safe(counted(found))}"
    if found.shared:
        yield "<h2>What the best five share</h2>"
        shares = [[n, percent(a), percent(b)] for n, (a, b) in found.shared.items()]
        yield _table(["atom", "% of the best five", "% of all"], shares)
    if found.causes:
        yield "<h2>Why candidates were not evaluated</h2>"
        yield _table(["cause", "times"], [[c, str(n)] for c, n in found.causes.items()])
    yield "<h2>Cost</h2>"
    yield "".join(f"<p>{_safe(line)}" for line in spending(found))
    yield "<h2>Candidates</h2><p class=faint>Best first, then the others in their order."
    rest = [row for row in found.rows if row not in found.ranked]
    yield from (_candidate(row) for row in (*found.ranked, *rest))


def _result(found: Reading) -> str:
    chosen = found.chosen
    if chosen is None:
        return "<p>The search has not ended."
    test, base = chosen.test, chosen.base
    note = f"<p class=faint>{test.examples} examples; 95 % intervals, images resampled."
    shown = _table(RESULT_HEAD, result_rows(test, base)) + note
    if chosen.front:
        shown += f"<h2>Pareto front</h2><p class=faint>{_safe(FRONT)}" + _table(*front(chosen))
    return shown


def _chart(found: Reading) -> str:
    """Every candidate that was measured as a dot, the best so far as a step."""
    dots = [
        (row.spent, row.tried.objective, row.tried.status, row.name)
        for row in found.rows
        if row.tried.objective is not None
    ]
    if not dots:
        return "<p>Nothing has been measured yet."
    most = max(spent for spent, *_ in dots)
    values = sorted(value for _, value, *_ in dots)
    # A few hopeless candidates would press all others into one line.
    low, high = values[len(values) // 10], values[-1]
    room = (high - low) or 1.0

    def place(spent: int, value: float) -> tuple[float, float]:
        return 60 + 920 * spent / most, 280 - 250 * (max(value, low) - low) / room

    marks = []
    for spent, value, status, name in dots:
        x, y = place(spent, value)
        told = _safe(f"{name}: {value:+.4f} ({status})")
        dot = f'<circle class="{status}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        marks.append(f"{dot}<title>{told}</title></circle>")
    steps: list[str] = []
    for spent, value in found.curve():
        x, y = place(spent, value)
        steps.append(f"H{x:.1f} V{y:.1f}" if steps else f"M{x:.1f} {y:.1f}")
    path = f'<path d="{" ".join(steps)} H980"/>' if steps else ""
    labels = (
        f'<text x="4" y="34">{high:+.3f}</text><text x="4" y="284">{low:+.3f}</text>'
        f'<text x="900" y="296">{most} answers</text>'
    )
    box = '<svg viewBox="0 0 1000 300" role="img" aria-label="objective over answers">'
    return f"{box}{path}{''.join(marks)}{labels}</svg>"


def _candidate(row: Row) -> str:
    inside = ""
    if row.changed:
        parents = ", ".join(row.proposed.parents)
        changed = "".join(f"<li>{_change(change)}" for change in row.changed)
        inside += f"<p>Against {_safe(parents)}:<ul>{changed}</ul>"
    if row.proposed.state is not None:
        body = {name: row.proposed.state[name] for name in COMPONENTS}
        inside += f"<pre>{_safe(json.dumps(body, indent=1))}</pre>"
    inside += "".join(f"<p>{_safe(problem)}" for problem in row.proposed.problems)
    return f"<details><summary>{_safe(_became(row))}</summary>{inside}</details>"


def _became(row: Row) -> str:
    """One line: who proposed it, and what came of it."""
    tried = row.tried
    if tried.same_as:
        came = f"keeps the same tokens as {tried.same_as}"
    elif tried.objective is None:
        came = f"{tried.status} {tried.reason}".strip()
    else:
        figures = (("", tried.accuracy), ("+", tried.accuracy_plus))
        shares = [f"accuracy{sign} {percent(v)} %" for sign, v in figures if v is not None]
        told = [f"objective {tried.objective:+.4f}", *shares, f"{tried.examples} answers"]
        came = ", ".join(told)
        if tried.status != "evaluated":
            came = f"{tried.status} after {came} {tried.reason}".strip()
    return f"{row.name} by {row.proposed.origin}: {came}"


def _change(change: Change) -> str:
    before, after = json.dumps(change.before), json.dumps(change.after)
    return _safe(f"{change.where} {change.kind}: {before} -> {after}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{_safe(cell)}" for cell in head)
    lines = (
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{_safe(c)}" for i, c in enumerate(row))
        for row in rows
    )
    return f"<table><tr>{first}{''.join(lines)}</table>"


def _safe(text: str) -> str:
    return html.escape(text)
