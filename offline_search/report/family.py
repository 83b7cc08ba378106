"""The tree of parents: which candidate was made from which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offline_search.report.search_report import CandidateRow, SearchReport
from vllm_autoprune.pages.document import Details, Section

_MAX_DEPTH = 60
"""Generations that are nested; later ones are entries of the last."""

Children = Mapping[str, Sequence[CandidateRow]]


def build_family(report: SearchReport) -> Section:
    """The line of descent of the winner, and the whole tree folded."""
    rows = {row.name: row for row in report.rows}
    children: dict[str, list[CandidateRow]] = {}
    roots = []
    for row in report.rows:
        parent = row.proposal.parents[0] if row.proposal.parents else None
        if parent in rows:
            children.setdefault(str(parent), []).append(row)
        else:
            roots.append(row)
    winner = report.winner.winner if report.winner is not None else None
    line = list_ancestors(winner, rows)
    texts = []
    if len(line) > 1:
        steps = [f"{row.name} ({row.origin}, {_result(row, report)})" for row in line]
        texts = [f"Line of the winner: {' → '.join(steps)}."]
    elif line:
        texts = [f"The winner {line[0].name} has no parents: {line[0].origin}."]
    summaries = {
        row.name: f"{row.name} {row.origin}, {_result(row, report)}{_mark(row, line)}"
        for row in report.rows
    }
    ancestors = {row.name for row in line}
    entries = [_entry(row, children, ancestors, summaries, 0) for row in roots]
    tree = Details(f"All {len(report.rows)} candidates by parent", entries=entries)
    return Section("Tree of parents", texts, entries=[tree])


def list_ancestors(name: str | None, rows: Mapping[str, CandidateRow]) -> list[CandidateRow]:
    """A candidate's line of first parents, from the oldest down to itself."""
    line: list[CandidateRow] = []
    row = rows.get(name or "")
    while row is not None and row not in line:
        line.append(row)
        parents = row.proposal.parents
        row = rows.get(parents[0]) if parents else None
    return line[::-1]


def _entry(
    row: CandidateRow,
    children: Children,
    ancestors: set[str],
    texts: Mapping[str, str],
    depth: int,
) -> Details:
    own = children.get(row.name, ())
    if depth >= _MAX_DEPTH:
        items = [texts[each.name] for each in _list_descendants(row, children)]
        return Details(texts[row.name], items=items)
    return Details(
        texts[row.name],
        entries=[_entry(each, children, ancestors, texts, depth + 1) for each in own],
        folded=row.name not in ancestors,
    )


def _list_descendants(row: CandidateRow, children: Children) -> list[CandidateRow]:
    found, queue = [], list(children.get(row.name, ()))
    while queue:
        each = queue.pop(0)
        found.append(each)
        queue += children.get(each.name, ())
    return found


def _mark(row: CandidateRow, line: Sequence[CandidateRow]) -> str:
    if row not in line:
        return ""
    return ", the winner" if row == line[-1] else ", ancestor of the winner"


def _result(row: CandidateRow, report: SearchReport) -> str:
    objective = row.result.objective
    return row.status if objective is None else report.format_objective(objective)
