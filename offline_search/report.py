"""Report on the ledger of a finished or running search: contents, Markdown, and progress lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from offline_search.candidates import base_state
from offline_search.components import BASE, COMPONENTS, CORE, RANK_AT, JsonObject
from offline_search.history import FAILURES_TO_GIVE_UP, History, Trial, gave_up
from offline_search.ledger import (
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
from vllm_autoprune.errors import SearchError
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate, count_decimals
from vllm_autoprune.tpdsl.transfer import Change, list_changes

R = TypeVar("R", bound=Record)

_STATUS_WORDS: Mapping[Status, str] = {
    "evaluated": "measured in full",
    "dropped": "stopped early",
    "same": "with the same tokens as an earlier one",
    "unevaluated": "not measured",
    "invalid": "invalid",
    "unsafe": "unsafe",
}
"""Outcomes of candidates as a report names them."""

_ORIGIN_WORDS: Mapping[str, str] = {
    "llm": "language model",
    "tpe": "TPE",
}
"""Origins of candidates as a report names them, where that differs from the ledger."""

_NOT_EVALUATED = ("invalid", "unsafe", "unevaluated")


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
        return _ORIGIN_WORDS.get(self.proposal.origin, self.proposal.origin)

    @property
    def status(self) -> str:
        """The outcome, in words."""
        return _STATUS_WORDS[self.result.status]

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
    ``duration`` are seconds from the first record to the end of the last.
    """

    settings: Settings
    rows: tuple[CandidateRow, ...]
    base_objective: float | None
    winner: WinnerRecord | None
    cost: SearchCost
    duration: float

    @property
    def ranked(self) -> list[CandidateRow]:
        """Fully evaluated candidates, best first."""
        evaluated = [row for row in self.rows if row.objective is not None]
        return sorted(evaluated, key=lambda row: -(row.objective or 0.0))

    @property
    def statuses(self) -> Mapping[str, int]:
        """Number of candidates of each outcome, in words."""
        return dict(Counter(row.status for row in self.rows).most_common())

    @property
    def causes(self) -> Mapping[str, int]:
        """Number of candidates per reason for which they were not evaluated."""
        failed = [row.result for row in self.rows if row.result.status in _NOT_EVALUATED]
        causes = Counter(f"{result.status}: {result.reason}" for result in failed)
        return dict(causes.most_common())

    @property
    def origins(self) -> Mapping[str, tuple[int, int]]:
        """Number of candidates of each origin, and how many of them became the best so far."""
        counts: dict[str, tuple[int, int]] = {}
        best = float("-inf")
        for row in self.rows:
            improves = row.objective is not None and row.objective > best
            best = max(best, row.objective) if row.objective is not None else best
            candidates, improvements = counts.get(row.origin, (0, 0))
            counts[row.origin] = (candidates + 1, improvements + improves)
        return counts

    def curve(self) -> list[tuple[int, float]]:
        """(answers spent, best objective so far) at every improvement."""
        points: list[tuple[int, float]] = []
        for row in self.rows:
            value = row.objective
            if value is not None and (not points or value > points[-1][1]):
                points.append((row.spent, value))
        return points

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


def read_report(records: Iterable[Record]) -> SearchReport:
    """The report on a ledger's records; raises :class:`SearchError` for an empty ledger."""
    known = list(records)
    opened = _of_type(known, SettingsRecord)
    if not opened:
        raise SearchError("the ledger is empty -> give the ledger of a search that has begun")
    settings, winners = opened[0].settings, _of_type(known, WinnerRecord)
    replies, evaluations = _of_type(known, ReplyRecord), _of_type(known, EvaluationRecord)
    spans = _time_spans(known)
    return SearchReport(
        settings=settings,
        rows=_read_rows(known),
        base_objective=_measure_base(evaluations, settings),
        winner=winners[0] if winners else None,
        cost=SearchCost(
            replies=len(replies),
            failed_replies=sum(reply.text is None for reply in replies),
            repairs=sum(reply.attempt == "repair" for reply in replies),
            proposer=sum((reply.cost for reply in replies), Cost()),
            proposer_seconds=_busy_seconds(replies),
            answers=sum(len(record.logprob) for record in evaluations),
            failed_evaluations=sum(bool(record.failure) for record in evaluations),
            evaluator_seconds=_busy_seconds(evaluations),
        ),
        duration=max((end for _, end in spans), default=0.0) - min(spans, default=(0.0, 0.0))[0],
    )


def _measure_base(evaluations: Sequence[EvaluationRecord], settings: Settings) -> float | None:
    """The base policy's objective on the search split; None until it is measured."""
    digest = base_state(settings).digest
    answers = {
        (record.digest, record.budget): np.asarray(record.logprob)
        for record in evaluations
        if record.split == "search" and record.start == 0 and not record.failure
        if record.digest in (digest, ALL_TOKENS)
    }
    if settings.objective == "mme":
        return None  # the ledger does not have the categories of the questions
    full = answers.get((ALL_TOKENS, 0))
    base = [answers[digest, budget] for budget in settings.budgets if (digest, budget) in answers]
    if full is None or len(base) < len(settings.budgets):
        return None
    means = [float((values - full[: len(values)]).mean()) for values in base]
    return round(sum(means) / len(means), 6)


def _of_type(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _read_rows(records: Sequence[Record]) -> tuple[CandidateRow, ...]:
    proposals = {record.name: record for record in _of_type(records, ProposalRecord)}
    results = {record.name: record for record in _of_type(records, TrialRecord)}
    rows, spent = [], 0
    for name, proposal in proposals.items():
        if name not in results:
            continue
        spent += results[name].examples
        parent = proposals.get(proposal.parents[0]) if proposal.parents else None
        before, after = _components(parent), _components(proposal)
        changes = list_changes(before, after) if before is not None and after is not None else ()
        rows.append(CandidateRow(proposal, results[name], spent, changes))
    return tuple(rows)


def _components(proposal: ProposalRecord | None) -> JsonObject | None:
    if proposal is None or proposal.state is None:
        return None
    searched = (*COMPONENTS, CORE, RANK_AT, BASE)
    return {name: proposal.state[name] for name in searched if name in proposal.state}


def _busy_seconds(records: Sequence[ReplyRecord] | Sequence[EvaluationRecord]) -> float:
    """Length of the union of the records' time spans, because requests run concurrently."""
    total, until = 0.0, 0.0
    for start, end in sorted(_time_spans(records)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _time_spans(records: Sequence[Record]) -> list[tuple[float, float]]:
    clocks = [record.clock for record in records if record.clock.at]
    return [(clock.at, clock.at + clock.seconds) for clock in clocks]


_MAX_ROWS = 10


def as_markdown(report: SearchReport) -> str:
    """Result, best candidates, causes of failures, and costs."""
    settings, winner = report.settings, report.winner
    budgets = ", ".join(map(str, settings.budgets))
    parts = [
        f"Strategy {settings.strategy}, base policy {settings.base_policy}, K = {budgets}, "
        f"seed {settings.seed}; {settings.evaluator}; proposer {settings.proposer or 'none'}."
    ]
    if winner is None:
        parts.append("No winner yet: the search has not ended.")
    else:
        parts.append(
            f"Winner: {winner.winner}, digest {winner.digest[:12]}, on the test split\n"
            f"({winner.test.examples} held-out examples; 95 % intervals over images):"
        )
        parts.append(result_table(winner).markdown())
    head = ["candidate", "objective", "accuracy %", "accuracy+ %", "answers", "origin"]
    candidates = [
        [
            row.name,
            f"{row.objective:+.4f}",
            format_percent(row.result.accuracy),
            format_percent(row.result.accuracy_plus),
            str(row.result.examples),
            row.origin,
        ]
        for row in report.ranked[:_MAX_ROWS]
    ]
    parts.append(Table("", head, candidates, "lrrrrl").markdown())
    parts.append(count_candidates(report))
    if report.causes:
        parts.append(cause_table(report).markdown())
    return "\n\n".join([*parts, "\n".join(describe_cost(report))]) + "\n"


def result_table(winner: WinnerRecord) -> Table:
    """The winner on the test split, the base policy, and the difference."""
    test, base = winner.test, winner.base
    rows = [
        [name, _format_interval(scores.objective), format_percent(scores.accuracy),
         format_percent(scores.accuracy_plus), f"{scores.mme_total:.1f}"]
        for name, scores in (("winner", test), ("base policy", base))
    ]  # fmt: skip
    gain, accuracy_gain = _format_interval(test.gain), _format_interval(test.accuracy_gain, 100)
    mme = f"{test.mme_total - base.mme_total:+.1f}"
    head = ["", "objective", "accuracy %", "accuracy+ %", "MME total"]
    return Table("", head, [*rows, ["gain, paired", gain, accuracy_gain, "", mme]], "lrrrr")


def cause_table(report: SearchReport) -> Table:
    """Reasons for which candidates were not evaluated, with the number of candidates each."""
    rows = [[cause, str(count)] for cause, count in report.causes.items()]
    return Table("", ["cause", "times"], rows, "lr")


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
        estimate = report.format_objective(winner.estimates[winner.winner])
        yield (
            f"On both together {winner.winner} has {estimate}, "
            f"{report.format_objective(margin).lstrip('+')} more than {rivals[0]}, the next."
        )
    yield describe_leader(winner, report.ranked[0].name if report.ranked else None)
    confirmed = winner.confirmed[winner.winner].objective
    score = next((row.objective for row in report.rows if row.name == winner.winner), None)
    if score is not None:
        search, validation, test = map(
            report.format_objective, (score, confirmed.value, winner.test.objective.value)
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


def _format_interval(estimate: Estimate, scale: float = 1.0) -> str:
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
        best, leader = history.best(), "no leader on the search split"
        self._leader = None if best is None else best.name
        if best is not None:
            origin = best.proposal.origin
            leader = f"{best.name} by {origin} leads on the search split, {best.score:+.4f}"
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        remaining = "time left unknown"
        if share > 0:
            seconds = (self._clock() - self._rounds_started) * (1 - share) / share
            minutes = f"{seconds / 60:.0f} min"
            remaining = f"{f'{seconds:.0f} s' if seconds < 100 else minutes} left"
        self._write(f"{share:4.0%} round {number}: {statuses}; {leader}{tokens}, {remaining}")
        for trial in trials:
            if trial.result.status in _NOT_EVALUATED:
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
            f"winner {winner.winner}: test objective {_format_interval(test.objective)}, gain over "
            f"the base policy {_format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if self._leader is not None:
            self._write(describe_leader(winner, self._leader))
