"""A ledger read for people: curves, causes, what winners share, what it cost.

Knows nothing about how any of it is drawn. A search that still runs can be read as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from offline_search.proposal import COMPONENTS
from offline_search.records import (
    Chosen,
    Cost,
    Evaluated,
    Opened,
    Proposed,
    Record,
    Replied,
    Tried,
)
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.states.differences import Change, list_changes

_TOP = 5
_TOLD = 10


@dataclass(frozen=True)
class Row:
    """One candidate; spent counts answers of the search split up to and with it."""

    proposed: Proposed
    tried: Tried
    spent: int
    changed: tuple[Change, ...]

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposed.name


@dataclass(frozen=True)
class Spending:
    """Both costs of a search, apart: what its proposer took, and its evaluator."""

    replies: int
    failed_replies: int
    repairs: int
    proposer: Cost
    proposer_seconds: float
    answers: int
    failed_evaluations: int
    evaluator_seconds: float


@dataclass(frozen=True)
class Reading:
    """Everything that a report shows."""

    settings: Settings
    rows: tuple[Row, ...]
    chosen: Chosen | None
    statuses: Mapping[str, int]
    causes: Mapping[str, int]
    origins: Mapping[str, tuple[int, int]]
    shared: Mapping[str, tuple[float, float]]
    spending: Spending
    span: float

    @property
    def ranked(self) -> list[Row]:
        """Candidates that were evaluated to the end, the best first."""
        whole = [row for row in self.rows if row.tried.status == "evaluated"]
        return sorted(whole, key=lambda row: -(row.tried.objective or 0.0))

    def curve(self) -> list[tuple[int, float]]:
        """(answers spent, best objective by then) at every improvement."""
        found: list[tuple[int, float]] = []
        for row in self.rows:
            value = row.tried.objective
            if row.tried.status != "evaluated" or value is None:
                continue
            if not found or value > found[-1][1]:
                found.append((row.spent, value))
        return found


def reading(records: Iterable[Record]) -> Reading:
    """Read a ledger's records; raises :class:`SearchError` for one that holds no search."""
    known = list(records)
    opened = next((record for record in known if isinstance(record, Opened)), None)
    if opened is None:
        raise SearchError("the ledger is empty -> give the ledger of a search that has begun")
    rows = _rows(known)
    times = [record.clock.at for record in known if record.clock.at]
    ends = [record.clock.at + record.clock.seconds for record in known if record.clock.at]
    return Reading(
        settings=opened.settings,
        rows=rows,
        chosen=next((record for record in known if isinstance(record, Chosen)), None),
        statuses=dict(Counter(row.tried.status for row in rows).most_common()),
        causes=_causes(rows),
        origins=_origins(rows),
        shared=_shared(rows),
        spending=_spending(known),
        span=max(ends) - min(times) if times else 0.0,
    )


def _rows(records: list[Record]) -> tuple[Row, ...]:
    proposals = {record.name: record for record in records if isinstance(record, Proposed)}
    trials = {f"{r.round}.{r.index}": r for r in records if isinstance(r, Tried)}
    rows, spent = [], 0
    for name, proposed in proposals.items():
        if name not in trials:
            continue
        spent += trials[name].examples
        parent = proposals.get(proposed.parents[0]) if proposed.parents else None
        rows.append(Row(proposed, trials[name], spent, _changed(parent, proposed)))
    return tuple(rows)


def _changed(parent: Proposed | None, child: Proposed) -> tuple[Change, ...]:
    if parent is None or parent.state is None or child.state is None:
        return ()
    return list_changes(_body(parent.state), _body(child.state))


def _body(state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {name: state[name] for name in COMPONENTS}


def _causes(rows: Iterable[Row]) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for row in rows:
        if row.tried.status in ("invalid", "unsafe", "unevaluated"):
            found[f"{row.tried.status}: {row.tried.reason}"] += 1
    return dict(found.most_common())


def _origins(rows: Iterable[Row]) -> Mapping[str, tuple[int, int]]:
    """Origin -> (candidates, those that were the best when they came)."""
    found: dict[str, tuple[int, int]] = {}
    best = float("-inf")
    for row in rows:
        value = row.tried.objective if row.tried.status == "evaluated" else None
        leads = value is not None and value > best
        best = max(best, value) if value is not None else best
        tried, led = found.get(row.proposed.origin, (0, 0))
        found[row.proposed.origin] = (tried + 1, led + leads)
    return found


def _shared(rows: Iterable[Row]) -> Mapping[str, tuple[float, float]]:
    """Atom -> its share among the best, and the smaller one among all; most telling first."""
    whole = [row for row in rows if row.tried.status in ("evaluated", "dropped")]
    ranked = sorted(
        (row for row in whole if row.tried.status == "evaluated"),
        key=lambda row: -(row.tried.objective or 0.0),
    )[:_TOP]
    if not ranked:
        return {}
    best = Counter(name for row in ranked for name in _atoms(row.proposed.state))
    every = Counter(name for row in whole for name in _atoms(row.proposed.state))
    shares = {name: (best[name] / len(ranked), every[name] / len(whole)) for name in best}
    telling = {name: share for name, share in shares.items() if share[0] > share[1]}
    return dict(sorted(telling.items(), key=lambda item: item[1][1] - item[1][0])[:_TOLD])


def _atoms(value: JsonValue) -> set[str]:
    """Every atom that a state names."""
    if isinstance(value, list):
        return {name for item in value for name in _atoms(item)}
    if not isinstance(value, dict):
        return set()
    own = {value["atom"]} if isinstance(value.get("atom"), str) else set()
    parts = [item for name, item in value.items() if name not in ("safety", "budget", "source")]
    return {str(name) for name in own} | {name for item in parts for name in _atoms(item)}


def _spending(records: list[Record]) -> Spending:
    replies = [record for record in records if isinstance(record, Replied)]
    evaluations = [record for record in records if isinstance(record, Evaluated)]
    cost = Cost()
    for reply in replies:
        cost += reply.cost
    return Spending(
        replies=len(replies),
        failed_replies=sum(reply.text is None for reply in replies),
        repairs=sum(reply.attempt == "repair" for reply in replies),
        proposer=cost,
        proposer_seconds=_covered(replies),
        answers=sum(len(record.logprob) for record in evaluations),
        failed_evaluations=sum(bool(record.failure) for record in evaluations),
        evaluator_seconds=_covered(evaluations),
    )


def _covered(records: Iterable[Replied | Evaluated]) -> float:
    """Seconds during which at least one of the records was being made: many are at once."""
    spans = sorted((r.clock.at, r.clock.at + r.clock.seconds) for r in records if r.clock.at)
    total, until = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
