"""Report on the ledger of a finished or running search, and the lines that it prints as it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offline_search.candidates import base_state
from offline_search.history import FAILURES_TO_GIVE_UP, History, Trial, gave_up
from offline_search.ledger import (
    ALL_TOKENS,
    Cost,
    EvaluationRecord,
    ProposalRecord,
    R,
    Record,
    ReplyRecord,
    SettingsRecord,
    Status,
    TrialRecord,
    WinnerRecord,
)
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.report import Cell, Document, Row, Section, Table, Tone
from vllm_autoprune.statistics import Estimate

_STATUS_WORDS: Mapping[Status, str] = {
    "evaluated": "measured in full",
    "dropped": "stopped early",
    "same": "with the same tokens as an earlier one",
    "unevaluated": "not measured",
    "invalid": "invalid",
    "unsafe": "unsafe",
}
_MAX_ROWS = 10


@dataclass(frozen=True)
class _CandidateRow:
    """One candidate; ``spent`` counts answers of the search split up to and including it."""

    proposal: ProposalRecord
    result: TrialRecord
    spent: int

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposal.name

    @property
    def origin(self) -> str:
        """What proposed the candidate, in words."""
        origin = self.proposal.origin
        return {"llm": "language model", "tpe": "TPE"}.get(origin, origin)

    @property
    def status(self) -> str:
        """The outcome, in words."""
        return _STATUS_WORDS[self.result.status]


@dataclass(frozen=True)
class _SearchReport:
    """What a ledger says.

    ``duration`` are seconds from the first record to the end of the last.
    """

    settings: Settings
    rows: Sequence[_CandidateRow]
    winner: WinnerRecord | None
    replies: Sequence[ReplyRecord]
    evaluations: Sequence[EvaluationRecord]
    duration: float

    @property
    def ranked(self) -> list[_CandidateRow]:
        """Fully evaluated candidates, best first."""
        evaluated = [row for row in self.rows if row.result.score is not None]
        return sorted(evaluated, key=lambda row: -(row.result.score or 0.0))

    @property
    def statuses(self) -> Mapping[str, int]:
        """Number of candidates of each outcome, in words."""
        return dict(Counter(row.status for row in self.rows).most_common())

    @property
    def causes(self) -> Mapping[str, int]:
        """Number of candidates per reason for which they were not evaluated."""
        failed = [row.result for row in self.rows if row.result.failed]
        causes = Counter(f"{result.status}: {result.reason}" for result in failed)
        return dict(causes.most_common())

    def curve(self) -> list[tuple[int, float]]:
        """(answers spent, best objective so far) at every improvement."""
        points: list[tuple[int, float]] = []
        for row in self.rows:
            score = row.result.score
            if score is not None and (not points or score > points[-1][1]):
                points.append((row.spent, score))
        return points

    def format(self, *values: float | None) -> list[str]:
        """Objectives with as many decimals as the width of the winner's interval supports.

        Without a winner, the spread of the candidates stands for it.
        """
        measured = [row.result.objective or 0.0 for row in self.rows] or [0.0]
        low, high = min(measured), max(measured)
        if self.winner is not None:
            low, high = self.winner.test.objective.low, self.winner.test.objective.high
        digits = Estimate(low, low, high).count_decimals()
        return ["unknown" if value is None else f"{value:+.{digits}f}" for value in values]

    @property
    def base_objective(self) -> float | None:
        """The base policy's objective on the search split; None until it is measured."""
        digest, base = base_state(self.settings).digest, dict[int, np.ndarray]()
        full = np.empty(0)
        for record in self.evaluations:
            if record.split == "search" and record.digest == ALL_TOKENS:
                full = np.asarray(record.logprob)
            elif record.split == "search" and record.digest == digest:
                base[record.budget] = np.asarray(record.logprob)
        # For MME's total the ledger would need the categories of the questions.
        if self.settings.objective == "mme" or len(base) < len(self.settings.budgets):
            return None
        return round(float(np.mean([(values - full).mean() for values in base.values()])), 6)

    def document(self) -> Document:
        settings, winner, ranked = self.settings, self.winner, self.ranked
        leader = ranked[0].name if ranked else None
        tone: Tone = "open"
        answer = "The search has not ended."
        facts = [f"measured on {settings.evaluator}"] if settings.evaluator else []
        facts += [f"proposer: {settings.proposer or 'none'}", f"seed {settings.seed}"]
        facts.append(f"{len(self.rows)} candidates")
        sections = []
        if winner is not None:
            gain, base = winner.test.gain, settings.base_policy
            tone, verdict = "open", f"shows no difference to {base} alone"
            if gain.low > 0 or gain.high < 0:
                tone = "good" if gain.low > 0 else "bad"
                verdict = f"is {'better' if gain.low > 0 else 'worse'} than {base} alone"
            value, low, high = self.format(gain.value, gain.low, gain.high)
            answer = (
                f"Candidate {winner.winner} won and {verdict} on the test split: objective {value} "
                f"{settings.objective_unit} ({low} to {high}), accuracy "
                f"{_percent(winner.test.accuracy)} % against {_percent(winner.base.accuracy)} %."
            )
            facts += [f"{winner.test.examples} test examples", f"digest {winner.digest[:12]}"]
            why = (
                f"The {len(winner.confirmed)} best candidates of the search split were measured on "
                "the "
                "validation split. The winner has the highest objective on the examples of both "
                "together: the search split alone favours candidates that were lucky on it."
            )
            tables = [self.list_finalists(winner)]
            sections.append(
                Section(
                    "Why this candidate", [why, _describe_leader(winner, leader)], tables=tables
                )
            )
            test = "Examples that no candidate was chosen on."
            if settings.objective == "mme":
                test += (
                    " MME total: accuracy, and accuracy+ (both answers of a pair right), in per "
                    "cent, "
                    "added over all categories."
                )
            tables = [self.list_result(winner)]
            sections.append(Section("Result on the test split", [test], tables=tables))
        elif leader is not None:
            measured = self.base_objective
            if measured is not None and measured >= (ranked[0].result.score or 0.0):
                leader = f"{settings.base_policy} alone"
            answer = f"The search has not ended; {leader} leads on the search split."
        if self.rows:
            sections.append(self.list_candidates())
        sections.append(Section("Cost", self.describe_cost()))
        title = f"{settings.strategy} on {settings.base_policy}, K = {settings.source_budget}"
        return Document(
            f"Search for a state: {title}", answer, tone, facts=facts, sections=sections
        )

    def list_finalists(self, winner: WinnerRecord) -> Table:
        """Objectives of the finalists and of the base policy on each split, the winner's first."""
        scores = {row.name: row.result.objective for row in self.rows}

        def cell(estimate: Estimate) -> Cell:
            value, low, high = self.format(estimate.value, estimate.low, estimate.high)
            return Cell(value, f"{low} to {high}")

        rows: list[Row] = []
        for name in sorted(winner.confirmed, key=lambda each: -winner.estimates[each]):
            won, validation = name == winner.winner, winner.confirmed[name]
            search, both = self.format(scores[name], winner.estimates[name])
            test = cell(winner.test.objective) if won else Cell("not measured")
            title = Cell(name, "winner" if won else "", tone="good" if won else "")
            rows.append([title, search, cell(validation.objective), both, test])
        search, base = self.format(self.base_objective, winner.base_validation)
        rows.append(["base policy", search, base, "–", cell(winner.base.objective)])
        head = ["candidate", "search", "validation", "search and validation", "test"]
        return Table("Objectives of the finalists", head, rows, "lrrrr")

    def list_result(self, winner: WinnerRecord) -> Table:
        """The winner on the test split, the base policy, the difference; MME's total if asked."""
        test, base, mme = winner.test, winner.base, self.settings.objective == "mme"
        rows = [
            [name, _format_interval(scores.objective), _percent(scores.accuracy),
             f"{scores.mme_total:.1f}"]
            for name, scores in (("winner", test), ("base policy", base))
        ]  # fmt: skip
        gains = [_format_interval(test.gain), _format_interval(test.accuracy_gain, 100)]
        rows.append(["gain, paired", *gains, f"{test.mme_total - base.mme_total:+.1f}"])
        head, columns = ["", "objective", "accuracy %", "MME total"], 4 if mme else 3
        cells = [row[:columns] for row in rows]
        return Table("Winner and base policy", head[:columns], cells, "lrrr"[:columns])

    def list_candidates(self) -> Section:
        """The best candidates, and why others were not measured."""
        rows = self.rows
        statuses = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        counted = f"{len(rows)} candidates: {statuses}."
        if gave_up([row.result for row in rows]):
            counted += (
                f" The search gave up: the last {FAILURES_TO_GIVE_UP} were invalid or unsafe."
            )
        texts = [
            f"Objective: {self.settings.objective_text}; 0 is as good as unpruned. "
            "Intervals: 95 %, images resampled.",
            counted,
        ]
        best = [
            [
                row.name,
                *self.format(row.result.score),
                _percent(row.result.accuracy),
                str(row.result.examples),
                row.origin,
                ", ".join(row.proposal.parents),
            ]
            for row in self.ranked[:_MAX_ROWS]
        ]
        head = ["candidate", "objective", "accuracy %", "answers", "origin", "parents"]
        tables = [Table("Best on the search split", head, best, "lrrrll")]
        if causes := [[cause, str(count)] for cause, count in self.causes.items()]:
            caption = "Why candidates were not evaluated"
            tables.append(Table(caption, ["cause", "times"], causes, "lr"))
        return Section("Candidates", texts, tables=tables)

    def describe_cost(self) -> list[str]:
        """Sentences on the cost of the proposer and of the evaluator."""
        replies, evaluations = self.replies, self.evaluations
        cost = sum((reply.cost for reply in replies), Cost())
        failed = sum(reply.text is None for reply in replies)
        repairs = sum(reply.attempt == "repair" for reply in replies)
        price = f", at a price of {cost.money:.4f}" if cost.money else ""
        return [
            f"Proposer: {len(replies):,} replies ({failed} failed, {repairs} to repair others), "
            f"{cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} completion tokens"
            f"{price}.",
            f"Evaluator: {sum(len(record.logprob) for record in evaluations):,} answers "
            f"({sum(bool(record.failure) for record in evaluations)} evaluations failed). "
            f"The whole search: {self.duration:,.0f} s.",
        ]


def read_report(records: Iterable[Record]) -> _SearchReport:
    """The report on a ledger's records; raises :class:`SearchError` for an empty ledger."""
    known = list(records)
    opened = _of_type(known, SettingsRecord)
    if not opened:
        raise SearchError("the ledger is empty -> give the ledger of a search that has begun")
    settings, evaluations = opened[0].settings, _of_type(known, EvaluationRecord)
    results = {record.name: record for record in _of_type(known, TrialRecord)}
    rows, spent = [], 0
    for proposal in _of_type(known, ProposalRecord):
        if proposal.name in results:
            spent += results[proposal.name].examples
            rows.append(_CandidateRow(proposal, results[proposal.name], spent))
    clocks = [record.clock for record in known if record.clock.at]
    begin = min((clock.at for clock in clocks), default=0.0)
    return _SearchReport(
        settings=settings,
        rows=rows,
        winner=next(iter(_of_type(known, WinnerRecord)), None),
        replies=_of_type(known, ReplyRecord),
        evaluations=evaluations,
        duration=max((clock.at + clock.seconds for clock in clocks), default=0.0) - begin,
    )


def _of_type(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _describe_leader(winner: WinnerRecord, leader: str | None) -> str:
    """Whether the winner also led on the search split, as the progress of the search shows it."""
    if leader is None or leader == winner.winner:
        return f"{winner.winner} was also the best on the search split."
    return (
        f"On the search split alone {leader} was better; with the validation split "
        f"{winner.winner} is."
    )


def _format_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A mean with its 95 % interval."""
    scaled = Estimate(*(scale * x for x in (estimate.value, estimate.low, estimate.high)))
    digits = scaled.count_decimals()
    return f"{scaled.value:+.{digits}f} ({scaled.low:+.{digits}f} to {scaled.high:+.{digits}f})"


def _percent(share: float | None) -> str:
    """A share in per cent, or an empty string."""
    return "" if share is None else f"{100 * share:.1f}"


class ProgressLog:
    """Writes one line a round, and one line for each candidate that was not evaluated."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write = write
        self._clock = clock
        self._created = self._rounds_started = clock()
        self._leader: str | None = None

    def on_start(self, history: History, examples: int) -> None:
        """Write the base policy's objective."""
        base = history.base.result.objective or 0.0
        elapsed = self._clock() - self._created
        self._write(f"base policy {base:+.4f} on {examples} examples ({elapsed:.0f} s)")
        self._rounds_started = self._clock()

    def on_round(self, trials: Sequence[Trial], history: History, share: float, cost: Cost) -> None:
        """Write the results of a round, the best so far, and the remaining time."""
        best, leader = history.best(), "no leader on the search split"
        if best is not None:
            self._leader, origin = best.name, best.proposal.origin
            leader = f"{best.name} by {origin} leads on the search split, {best.score:+.4f}"
            base = history.base.result.objective
            if base is not None and base >= best.score:
                behind = f"{best.name} by {origin} has {best.score:+.4f}"
                leader = f"the base policy leads on the search split, {base:+.4f}; {behind}"
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        remaining = "time left unknown"
        if share > 0:
            seconds = (self._clock() - self._rounds_started) * (1 - share) / share
            remaining = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            remaining += " left"
        number = trials[0].proposal.round
        self._write(f"{share:4.0%} round {number}: {statuses}; {leader}{tokens}, {remaining}")
        for trial in trials:
            if trial.result.failed:
                status, reason = trial.result.status, trial.result.reason
                self._write(f"       {trial.name} {status}: {reason[:120]}")
        if gave_up([trial.result for trial in history.trials]):
            count = FAILURES_TO_GIVE_UP
            self._write(f"gives up: the last {count} candidates were invalid or unsafe")

    def on_finish(self, winner: WinnerRecord) -> None:
        """Write the winner's scores on the test split, and whether it led the search."""
        test = winner.test
        self._write(
            f"winner {winner.winner}: test objective {_format_interval(test.objective)}, gain over "
            f"the base policy {_format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if self._leader is not None:
            self._write(_describe_leader(winner, self._leader))
