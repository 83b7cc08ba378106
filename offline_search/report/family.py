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
        steps = [f"{row.name} ({row.proposal.origin}, {_objective(row)})" for row in line]
        texts = [f"Line of the winner: {' → '.join(steps)}."]
    elif line:
        texts = [f"The winner {line[0].name} has no parents: {line[0].proposal.origin}."]
    ancestors = {row.name for row in line}
    entries = [_entry(row, children, ancestors, 0) for row in roots]
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


def _entry(row: CandidateRow, children: Children, ancestors: set[str], depth: int) -> Details:
    own = children.get(row.name, ())
    if depth >= _MAX_DEPTH:
        items = [_describe(each, ancestors) for each in _list_descendants(row, children)]
        return Details(_describe(row, ancestors), items=items)
    leaves = [each for each in own if each.name not in children]
    inner = [each for each in own if each.name in children]
    return Details(
        _describe(row, ancestors),
        items=[_describe(leaf, ancestors) for leaf in leaves],
        entries=[_entry(each, children, ancestors, depth + 1) for each in inner],
        folded=row.name not in ancestors,
    )


def _list_descendants(row: CandidateRow, children: Children) -> list[CandidateRow]:
    found, queue = [], list(children.get(row.name, ()))
    while queue:
        each = queue.pop(0)
        found.append(each)
        queue += children.get(each.name, ())
    return found


def _describe(row: CandidateRow, ancestors: set[str]) -> str:
    mark = " ★" if row.name in ancestors else ""
    return f"{row.name} {row.proposal.origin}, {_objective(row)}{mark}"


def _objective(row: CandidateRow) -> str:
    objective = row.result.objective
    return row.result.status if objective is None else f"{objective:+.4f}"
