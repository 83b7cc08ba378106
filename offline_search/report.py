"""Contents of a report, computed from the ledger of a finished or running search."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import JsonValue

from offline_search.candidates import base_state
from offline_search.components import BASE, COMPONENTS, CORE, RANK_AT, JsonObject
from offline_search.history import FAILURES_TO_GIVE_UP, History, Trial, gave_up
from offline_search.ledger import (
    ALL_TOKENS,
    Comparison,
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
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import Estimate, count_decimals
from vllm_autoprune.tpdsl.transfer import Change, list_changes

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
    searched = (*COMPONENTS, CORE, RANK_AT, BASE)
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


_MAX_ROWS = 10

RESULT_HEAD = ["", "objective", "accuracy %", "accuracy+ %", "MME total"]
CANDIDATE_HEAD = ["candidate", "objective", "accuracy %", "accuracy+ %", "answers", "origin"]


def as_markdown(report: SearchReport) -> str:
    """Result, best candidates, causes of failures, common atoms, and costs."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: SearchReport) -> Iterator[str]:
    settings, winner = report.settings, report.winner
    budgets = ", ".join(map(str, settings.budgets))
    yield (
        f"Strategy {settings.strategy}, base policy {settings.base_policy}, K = {budgets}, "
        f"seed {settings.seed}; {settings.evaluator}; proposer {settings.proposer or 'none'}."
    )
    yield ""
    if winner is None:
        yield "No winner yet: the search has not ended."
    else:
        yield f"Winner: {winner.winner}, digest {winner.digest[:12]}, on the test split"
        yield f"({winner.test.examples} held-out examples; 95 % intervals over images):"
        yield ""
        yield from table(RESULT_HEAD, result_rows(winner.test, winner.base), "lrrrr")
    yield ""
    candidates = [_candidate_cells(row) for row in report.ranked[:_MAX_ROWS]]
    yield from table(CANDIDATE_HEAD, candidates, "lrrrrl")
    yield ""
    yield count_candidates(report)
    yield ""
    if report.causes:
        yield from table(["cause", "times"], cause_rows(report), "lr")
        yield ""
    if report.common_atoms:
        rows = [[f"`{name}`", *shares] for name, *shares in common_atom_rows(report)]
        yield from table(["atom", "of the best five", "of all"], rows, "lrr")
        yield ""
    yield from describe_cost(report)


def result_rows(test: Comparison, base: Comparison) -> list[list[str]]:
    """Rows for :data:`RESULT_HEAD`: the winner, the base policy, and the difference."""
    rows = [
        [name, format_interval(one.objective), format_percent(one.accuracy),
         format_percent(one.accuracy_plus), f"{one.mme_total:.1f}"]
        for name, one in (("winner", test), ("base policy", base))
    ]  # fmt: skip
    gain, accuracy_gain = format_interval(test.gain), format_interval(test.accuracy_gain, 100)
    return [
        *rows,
        ["gain, paired", gain, accuracy_gain, "", f"{test.mme_total - base.mme_total:+.1f}"],
    ]


def explain_winner(report: SearchReport, winner: WinnerRecord) -> Iterator[str]:
    """The rule, the margin to the next candidate, and the leader of the search split if another."""
    ranked = sorted(winner.estimates, key=lambda name: -winner.estimates[name])
    yield (
        f"The {len(winner.confirmed)} best candidates of the search split were measured on the "
        "validation split. The winner has the highest objective on the examples of both together: "
        "the search split alone favours candidates that were lucky on it."
    )
    rivals = [name for name in ranked if name != winner.winner]
    if rivals and winner.winner in winner.estimates:
        margin = winner.estimates[winner.winner] - winner.estimates[rivals[0]]
        own_estimate = report.format_objective(winner.estimates[winner.winner])
        yield (
            f"On both together {winner.winner} has {own_estimate}, "
            f"{report.format_objective(margin).lstrip('+')} more than {rivals[0]}, the next."
        )
    yield describe_leader(winner, report.ranked[0].name if report.ranked else None)
    own = winner.confirmed[winner.winner].objective
    score = next((row.objective for row in report.rows if row.name == winner.winner), None)
    if score is not None:
        search, validation, test = map(
            report.format_objective, (score, own.value, winner.test.objective.value)
        )
        yield (
            f"Its objective is {search} on the search split, {validation} on the validation split "
            f"and {test} on the test split."
        )


def describe_leader(winner: WinnerRecord, leader: str | None) -> str:
    """Whether the winner also led on the search split, as the progress of the search shows it."""
    if leader is None or leader == winner.winner:
        return f"{winner.winner} was also the best on the search split."
    return (
        f"On the search split alone {leader} was better; with the validation split "
        f"{winner.winner} is."
    )


def cause_rows(report: SearchReport) -> list[list[str]]:
    """Reasons for which candidates were not evaluated, with the number of candidates each."""
    return [[cause, str(count)] for cause, count in report.causes.items()]


def common_atom_rows(report: SearchReport) -> list[list[str]]:
    """Atoms that the best candidates have in common, with their shares in per cent."""
    return [
        [name, format_percent(best), format_percent(every)]
        for name, (best, every) in report.common_atoms.items()
    ]


def _candidate_cells(row: CandidateRow) -> list[str]:
    result = row.result
    return [
        row.name,
        "" if result.objective is None else f"{result.objective:+.4f}",
        format_percent(result.accuracy),
        format_percent(result.accuracy_plus),
        str(result.examples),
        row.origin,
    ]


def count_candidates(report: SearchReport) -> str:
    """Sentence on the number of candidates, their statuses, and the success of each origin."""
    if not report.rows:
        return "No candidate has been proposed yet."
    statuses = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    origins = "; ".join(
        f"{origin} {improvements} of {count}"
        for origin, (count, improvements) in report.origins.items()
    )
    end = ""
    if gave_up([row.result for row in report.rows]):
        end = f" The search gave up: the last {FAILURES_TO_GIVE_UP} were invalid or unsafe."
    return (
        f"{len(report.rows)} candidates: {statuses}. Best when measured, by origin: {origins}.{end}"
    )


def describe_cost(report: SearchReport) -> Iterator[str]:
    """Sentences on the cost of the proposer and of the evaluator."""
    cost, proposer = report.cost, report.cost.proposer
    price = f", at a price of {proposer.money:.4f}" if proposer.money else ""
    yield (
        f"Proposer: {cost.replies:,} replies in {cost.proposer_seconds:,.0f} s "
        f"({cost.failed_replies} failed, {cost.repairs} to repair others), "
        f"{proposer.prompt_tokens:,} prompt and {proposer.completion_tokens:,} completion "
        f"tokens{price}."
    )
    yield (
        f"Evaluator: {cost.answers:,} answers in {cost.evaluator_seconds:,.0f} s "
        f"({cost.failed_evaluations} evaluations failed). The whole search: "
        f"{report.duration:,.0f} s."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Lines of a Markdown table; ``align`` has ``l`` or ``r`` for each column."""
    yield _format_row(head)
    yield _format_row(["--:" if side == "r" else ":--" for side in align])
    yield from (_format_row([cell.replace("|", "\\|") for cell in row]) for row in rows)


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A mean with its 95 % interval."""
    value, low, high = (scale * x for x in (estimate.value, estimate.low, estimate.high))
    digits = count_decimals(low, high)
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def format_percent(share: float | None) -> str:
    """A share in per cent, or an empty string."""
    return "" if share is None else f"{100 * share:.1f}"


class ProgressLog:
    """Writes one line a round, and one line for each candidate that was not evaluated."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write = write
        self._clock = clock
        self._created = clock()
        self._rounds_started = self._created
        self._leader: str | None = None

    def on_start(self, history: History, examples: int) -> None:
        """Write the base policy's objective."""
        base = history.base.objective or 0.0
        elapsed = self._clock() - self._created
        self._write(f"base policy {base:+.4f} on {examples} examples ({elapsed:.0f} s)")
        self._rounds_started = self._clock()

    def on_round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """Write the results of a round, the best so far, and the remaining time."""
        best = history.best()
        self._leader = None if best is None else best.name
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        self._write(
            f"{share:4.0%} round {number}: {statuses}; {_describe_leader(history)}{tokens}, "
            f"{self._remaining_time(share)}"
        )
        for trial in trials:
            if trial.result.status in ("invalid", "unsafe", "unevaluated"):
                self._write(
                    f"       {trial.name} {trial.result.status}: {trial.result.reason[:120]}"
                )
        if gave_up([trial.result for trial in history.trials]):
            self._write(
                f"gives up: the last {FAILURES_TO_GIVE_UP} candidates were invalid or unsafe"
            )

    def on_finish(self, winner: WinnerRecord) -> None:
        """Write the winner's scores on the test split, and whether it led the search."""
        test = winner.test
        self._write(
            f"winner {winner.winner}: test objective {format_interval(test.objective)}, gain over "
            f"the base policy {format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if self._leader is not None:
            self._write(describe_leader(winner, self._leader))

    def _remaining_time(self, share: float) -> str:
        elapsed = self._clock() - self._rounds_started
        if share <= 0:
            return "time left unknown"
        seconds = elapsed * (1 - share) / share
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


def _describe_leader(history: History) -> str:
    best = history.best()
    if best is None:
        return "no leader on the search split"
    return f"{best.name} by {best.proposal.origin} leads on the search split, {best.score:+.4f}"
