"""Contents of a report, computed from the ledger of a finished or running search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import JsonValue

from offline_search.candidates.components import JsonObject, searched_components
from offline_search.ledger.records import (
    ALL_TOKENS,
    Cost,
    EvaluationRecord,
    ProposalRecord,
    Record,
    ReplyRecord,
    SettingsRecord,
    Status,
    TrialRecord,
    WinnerRecord,
)
from offline_search.settings import Settings
from offline_search.strategies.start_states import base_state
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import count_decimals
from vllm_autoprune.tpdsl.states.differences import Change, list_changes

R = TypeVar("R", bound=Record)

STATUS_WORDS: Mapping[Status, str] = {
    "evaluated": "measured in full",
    "dropped": "stopped early",
    "same": "with the same tokens as an earlier one",
    "unevaluated": "not measured",
    "invalid": "invalid",
    "unsafe": "unsafe",
}
"""Outcomes of candidates as a report names them."""

ORIGIN_WORDS: Mapping[str, str] = {
    "llm": "language model",
    "tpe": "TPE",
}
"""Origins of candidates as a report names them, where that differs from the ledger."""

_TOP_CANDIDATES = 5
_MAX_COMMON_ATOMS = 10


@dataclass(frozen=True)
class CandidateRow:
    """One candidate; ``spent`` counts answers of the search split up to and including it."""

    proposal: ProposalRecord
    result: TrialRecord
    spent: int
    changes: tuple[Change, ...]

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposal.name

    @property
    def origin(self) -> str:
        """What proposed the candidate, in words."""
        return ORIGIN_WORDS.get(self.proposal.origin, self.proposal.origin)

    @property
    def status(self) -> str:
        """The outcome, in words."""
        return STATUS_WORDS[self.result.status]

    @property
    def components(self) -> JsonObject | None:
        """The searched components of the candidate's state."""
        return _components(self.proposal)

    @property
    def objective(self) -> float | None:
        """The objective, if the whole search split was evaluated."""
        return self.result.objective if self.result.status == "evaluated" else None


@dataclass(frozen=True)
class SearchCost:
    """Cost of a search: requests and time of its proposer, and of its evaluator."""

    replies: int
    failed_replies: int
    repairs: int
    proposer: Cost
    proposer_seconds: float
    answers: int
    failed_evaluations: int
    evaluator_seconds: float


@dataclass(frozen=True)
class SearchReport:
    """Everything that a report shows.

    ``base_objective`` is that of the base policy alone on the search split, if it was measured;
    ``origins`` has the number of candidates of each origin, and how many of them became the best
    so far; ``common_atoms`` has atoms that are more frequent among the best candidates than among
    all, with both shares.
    """

    settings: Settings
    rows: tuple[CandidateRow, ...]
    base_objective: float | None
    winner: WinnerRecord | None
    statuses: Mapping[str, int]
    causes: Mapping[str, int]
    origins: Mapping[str, tuple[int, int]]
    common_atoms: Mapping[str, tuple[float, float]]
    cost: SearchCost
    duration: float

    @property
    def ranked(self) -> list[CandidateRow]:
        """Fully evaluated candidates, best first."""
        return _rank(self.rows)

    def format_objective(self, value: float) -> str:
        """An objective with as many decimals as the width of the winner's interval supports.

        Without a winner, the spread of the candidates stands for it.
        """
        if self.winner is not None:
            low, high = self.winner.test.objective.low, self.winner.test.objective.high
        else:
            values = [row.result.objective or 0.0 for row in self.rows]
            low, high = min(values, default=0.0), max(values, default=0.0)
        return f"{value:+.{count_decimals(low, high)}f}"

    def curve(self) -> list[tuple[int, float]]:
        """(answers spent, best objective so far) at every improvement."""
        points: list[tuple[int, float]] = []
        for row in self.rows:
            value = row.objective
            if value is not None and (not points or value > points[-1][1]):
                points.append((row.spent, value))
        return points


def read_report(records: Iterable[Record]) -> SearchReport:
    """The report on a ledger's records; raises :class:`SearchError` for an empty ledger."""
    known = list(records)
    settings = _of_type(known, SettingsRecord)
    if not settings:
        raise SearchError("the ledger is empty -> give the ledger of a search that has begun")
    rows = _read_rows(known)
    winners = _of_type(known, WinnerRecord)
    return SearchReport(
        settings=settings[0].settings,
        rows=rows,
        base_objective=_measure_base(known, settings[0].settings),
        winner=winners[0] if winners else None,
        statuses=dict(Counter(row.status for row in rows).most_common()),
        causes=_count_causes(rows),
        origins=_count_origins(rows),
        common_atoms=_find_common_atoms(rows),
        cost=_sum_cost(known),
        duration=_measure_duration(known),
    )


def _measure_base(records: Sequence[Record], settings: Settings) -> float | None:
    """The base policy's objective on the search split; None until it is measured."""
    digest = base_state(settings).digest
    answers = {
        (record.digest, record.budget): np.asarray(record.logprob)
        for record in _of_type(records, EvaluationRecord)
        if record.split == "search" and record.start == 0 and not record.failure
        if record.digest in (digest, ALL_TOKENS)
    }
    if settings.objective == "mme":
        return None  # the ledger does not have the categories of the questions
    full = answers.get((ALL_TOKENS, 0))
    own = [answers[digest, budget] for budget in settings.budgets if (digest, budget) in answers]
    if full is None or len(own) < len(settings.budgets):
        return None
    means = [float((values - full[: len(values)]).mean()) for values in own]
    return round(sum(means) / len(means), 6)


def _of_type(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _read_rows(records: Sequence[Record]) -> tuple[CandidateRow, ...]:
    proposals = {record.name: record for record in _of_type(records, ProposalRecord)}
    results = {f"{r.round}.{r.index}": r for r in _of_type(records, TrialRecord)}
    rows, spent = [], 0
    for name, proposal in proposals.items():
        if name not in results:
            continue
        spent += results[name].examples
        parent = proposals.get(proposal.parents[0]) if proposal.parents else None
        rows.append(CandidateRow(proposal, results[name], spent, _changes(parent, proposal)))
    return tuple(rows)


def _changes(parent: ProposalRecord | None, child: ProposalRecord) -> tuple[Change, ...]:
    before, after = _components(parent), _components(child)
    return () if before is None or after is None else list_changes(before, after)


def _components(proposal: ProposalRecord | None) -> JsonObject | None:
    if proposal is None or proposal.state is None:
        return None
    searched = searched_components(core=True, rank_at=True, bases=True)
    return {name: proposal.state[name] for name in searched if name in proposal.state}


def _rank(rows: Iterable[CandidateRow]) -> list[CandidateRow]:
    evaluated = [row for row in rows if row.result.status == "evaluated"]
    return sorted(evaluated, key=lambda row: -(row.objective or 0.0))


def _count_causes(rows: Iterable[CandidateRow]) -> Mapping[str, int]:
    """Number of candidates per reason for which they were not evaluated."""
    causes: Counter[str] = Counter()
    for row in rows:
        if row.result.status in ("invalid", "unsafe", "unevaluated"):
            causes[f"{row.result.status}: {row.result.reason}"] += 1
    return dict(causes.most_common())


def _count_origins(rows: Iterable[CandidateRow]) -> Mapping[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    best = float("-inf")
    for row in rows:
        improves = row.objective is not None and row.objective > best
        best = max(best, row.objective) if row.objective is not None else best
        candidates, improvements = counts.get(row.origin, (0, 0))
        counts[row.origin] = (candidates + 1, improvements + improves)
    return counts


def _find_common_atoms(rows: Iterable[CandidateRow]) -> Mapping[str, tuple[float, float]]:
    """Share among the best and among all, of atoms that are more frequent among the best."""
    measured = [row for row in rows if row.result.status in ("evaluated", "dropped")]
    top = _rank(measured)[:_TOP_CANDIDATES]
    if not top:
        return {}
    in_top, in_all = _atom_shares(top), _atom_shares(measured)
    frequent = {name: (share, in_all[name]) for name, share in in_top.items()
                if share > in_all[name]}  # fmt: skip
    ordered = sorted(frequent.items(), key=lambda item: item[1][1] - item[1][0])
    return dict(ordered[:_MAX_COMMON_ATOMS])


def _atom_shares(rows: Sequence[CandidateRow]) -> dict[str, float]:
    counts = Counter(name for row in rows for name in dict.fromkeys(_atoms(row.proposal.state)))
    return {name: count / len(rows) for name, count in counts.items()}


def _atoms(value: JsonValue) -> Iterator[str]:
    """Names of all atoms of a state, except those that the search does not choose."""
    if isinstance(value, list):
        for item in value:
            yield from _atoms(item)
    elif isinstance(value, dict):
        if isinstance(atom := value.get("atom"), str):
            yield atom
        for name, item in value.items():
            if name not in ("safety", "budget", "source"):
                yield from _atoms(item)


def _sum_cost(records: Sequence[Record]) -> SearchCost:
    replies = _of_type(records, ReplyRecord)
    evaluations = _of_type(records, EvaluationRecord)
    return SearchCost(
        replies=len(replies),
        failed_replies=sum(reply.text is None for reply in replies),
        repairs=sum(reply.attempt == "repair" for reply in replies),
        proposer=sum((reply.cost for reply in replies), Cost()),
        proposer_seconds=_busy_seconds(replies),
        answers=sum(len(record.logprob) for record in evaluations),
        failed_evaluations=sum(bool(record.failure) for record in evaluations),
        evaluator_seconds=_busy_seconds(evaluations),
    )


def _busy_seconds(records: Sequence[ReplyRecord] | Sequence[EvaluationRecord]) -> float:
    """Length of the union of the records' time spans, because requests run concurrently."""
    total, until = 0.0, 0.0
    for start, end in sorted(_time_spans(records)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _measure_duration(records: Sequence[Record]) -> float:
    """Seconds from the first record to the end of the last."""
    spans = _time_spans(records)
    return max((end for _, end in spans), default=0.0) - min(spans, default=(0.0, 0.0))[0]


def _time_spans(records: Sequence[Record]) -> list[tuple[float, float]]:
    clocks = [record.clock for record in records if record.clock.at]
    return [(clock.at, clock.at + clock.seconds) for clock in clocks]
