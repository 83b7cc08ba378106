"""Report on the ledger of a finished or running search, and the lines that it prints as it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offline_search.candidates import BASE_PARENT, base_state
from offline_search.history import FAILURES_TO_GIVE_UP, History, Trial, gave_up
from offline_search.ledger import (
    ALL_TOKENS,
    Cost,
    EvaluationRecord,
    ProposalRecord,
    Record,
    ReplyRecord,
    SettingsRecord,
    Standing,
    Status,
    SummaryRecord,
    TrialRecord,
    WinnerRecord,
    select_records,
)
from offline_search.settings import Settings
from offline_search.winner_report import (
    WinnerReport,
    format_interval,
    format_objectives,
    format_percent,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.report import (
    Chart,
    Document,
    Mark,
    Section,
    Series,
    Table,
    Tone,
)
from vllm_autoprune.statistics import Estimate

_STATUS_WORDS: Mapping[Status, str] = {
    "evaluated": "measured in full",
    "dropped": "stopped early",
    "same": "with the same tokens as an earlier one",
    "unevaluated": "not measured",
    "invalid": "invalid",
    "unsafe": "unsafe",
}
_ORIGIN_WORDS = {"llm": "language model", "tpe": "TPE"}
_MAX_ROWS = 10


@dataclass(frozen=True)
class _SearchReport:
    """Contents of a ledger for a report.

    ``duration`` is the time from the first record to the end of the last, in seconds.
    """

    settings: Settings
    trials: Sequence[Trial]
    """All finished trials, without their states and values."""
    winner: WinnerRecord | None
    replies: Sequence[ReplyRecord]
    evaluations: Sequence[EvaluationRecord]
    standings: Mapping[int, Standing]
    """Leaders after each round, by the number of the round."""
    duration: float

    @property
    def ranked(self) -> list[Trial]:
        """Fully evaluated candidates, best first."""
        evaluated = [trial for trial in self.trials if trial.result.score is not None]
        return sorted(evaluated, key=lambda trial: -self._estimate(trial))

    def _estimate(self, trial: Trial) -> float:
        """The estimate over all questions; while a search runs, over the trial's own questions."""
        searched = {} if self.winner is None else self.winner.searched
        return searched.get(trial.name, trial.score)

    @property
    def statuses(self) -> Mapping[str, int]:
        """Number of candidates of each outcome, in words."""
        counts = Counter(_STATUS_WORDS[trial.result.status] for trial in self.trials)
        return dict(counts.most_common())

    @property
    def causes(self) -> Mapping[str, int]:
        """Number of candidates per reason for which they were not evaluated."""
        failed = [trial.result for trial in self.trials if trial.result.failed]
        causes = Counter(f"{result.status}: {result.reason}" for result in failed)
        return dict(causes.most_common())

    @property
    def answers(self) -> int:
        """Number of candidates' answers to search questions, including repeated ones."""
        if self.standings:
            return self.standings[max(self.standings)].answers
        return sum(trial.result.examples for trial in self.trials)

    def curve(self) -> list[tuple[int, float]]:
        """Points (answers so far, best objective so far) on the search split, at improvements.

        Questions that are asked again do not count; objectives are over the questions of a round.
        """
        points = list[tuple[int, float]]()
        answers = 0
        for trial in self.trials:
            answers += trial.result.examples
            score = trial.result.score
            if score is not None and (not points or score > points[-1][1]):
                points.append((answers, score))
        return points

    @property
    def base_objective(self) -> float | None:
        """The base policy's objective on the search split; None until it is measured."""
        digest = base_state(self.settings).digest
        base = dict[int | str, np.ndarray]()
        full = np.empty(0)
        # Blocks are in order; both the unpruned model and the base policy are asked every block.
        for record in self.evaluations:
            if record.split == "search" and record.digest == ALL_TOKENS:
                full = np.append(full, record.logprob)
            elif record.split == "search" and record.digest == digest:
                earlier = base.get(record.budget, np.empty(0))
                base[record.budget] = np.append(earlier, record.logprob)
        base = {
            budget: values
            for budget, values in base.items()
            if len(values) == len(full)
        }
        # MME's total needs the categories of the questions, which the ledger does not have, and
        # the values of several models their scales, which only its end has.
        settings = self.settings
        needs_more = settings.objective == "mme" or settings.models
        if needs_more or len(base) < len(settings.budgets):
            return None
        return round(
            float(np.mean([(values - full).mean() for values in base.values()])), 6
        )

    def document(self) -> Document:
        """The report as a page: result, why this candidate, all candidates, cost."""
        settings = self.settings
        ranked = self.ranked
        tone: Tone = "open"
        answer = "The search has not ended."
        sections = list[Section]()
        facts = [f"measured on {settings.evaluator}"] if settings.evaluator else []
        facts += [f"proposer: {settings.proposer or 'none'}", f"seed {settings.seed}"]
        facts.append(f"{len(self.trials)} candidates")
        if self.winner is not None:
            result = WinnerReport(settings, self.winner)
            tone = result.tone
            answer = result.answer
            facts += result.list_facts()
            leader = ranked[0].name
            if self.standings:
                leader = self.standings[max(self.standings)].best
            scores = {trial.name: trial.result.objective for trial in self.trials}
            scores[BASE_PARENT] = self.base_objective
            sections += result.list_sections(scores, leader)
        elif ranked:
            measured = self.base_objective
            is_behind = measured is not None and measured >= ranked[0].score
            leader = f"{settings.base_policy} alone" if is_behind else ranked[0].name
            answer = f"The search has not ended; {leader} leads on the search split."
        if self.standings:
            sections.append(self._describe_standings())
        if self.trials:
            sections.append(self._list_candidates(ranked))
        sections.append(self._describe_cost())
        title = (
            f"{settings.strategy} on {settings.base_policy}, K = {settings.budgets[0]}"
        )
        return Document(
            f"Search for a state: {title}", answer, tone, facts=facts, sections=sections
        )

    def _format(self, *values: float | None) -> list[str]:
        """Format objectives with as many decimals as the width of the winner's interval supports.

        Without a winner, the spread of the candidates replaces the width.
        """
        measured = [trial.result.objective or 0.0 for trial in self.trials] or [0.0]
        interval = Estimate(min(measured), min(measured), max(measured))
        if self.winner is not None:
            interval = self.winner.test.objective
        return format_objectives(interval, *values)

    def _describe_cost(self) -> Section:
        """Replies, tokens, answers and time that the search took."""
        cost = sum((reply.cost for reply in self.replies), Cost())
        failed = sum(reply.text is None for reply in self.replies)
        repairs = sum(reply.attempt == "repair" for reply in self.replies)
        price = f", at a price of {cost.money:.4f}" if cost.money else ""
        answers = sum(len(record.logprob) for record in self.evaluations)
        failures = sum(bool(record.failure) for record in self.evaluations)
        texts = [
            f"Proposer: {len(self.replies):,} replies ({failed} failed, {repairs} to repair "
            f"others), {cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} completion "
            f"tokens{price}.",
            f"Evaluator: {answers:,} answers ({failures} evaluations failed). "
            f"The whole search: {self.duration:,.0f} s.",
        ]
        return Section("Cost", texts)

    def _describe_standings(self) -> Section:
        """The best objective by round with its lower bound, and the trials tied with the best."""
        marks = []
        for number, standing in self.standings.items():
            objective = standing.objective
            tip = f"round {number}: {standing.best}, {objective:+.4f} ± {2 * standing.error:.4f}"
            high = 2 * objective - standing.low
            is_plateau = bool(standing.plateaus)
            marks.append(Mark(number, objective, tip, standing.low, high, is_plateau))
        last = self.standings[max(self.standings)]
        value, bound = self._format(last.objective, last.low)
        texts = [
            f"Best of the search split: {last.best}, {value}, at least {bound}: bars are two "
            "standard errors of its gain over the base policy. Hollow: a plateau.",
            f"Not known to be worse: {', '.join(last.tied) or 'none'}.",
        ]
        if last.plateaus > 1:
            texts.append(
                "The search stopped because several rounds found nothing better."
            )
        series = [Series("best so far", marks)]
        chart = Chart("Best objective", "round", "objective", series, linear=True)
        return Section("How sure the search is", texts, [chart])

    def _list_candidates(self, ranked: Sequence[Trial]) -> Section:
        """The best candidates, and the reasons why others were not measured."""
        statuses = ", ".join(
            f"{count} {status}" for status, count in self.statuses.items()
        )
        counted = f"{len(self.trials)} candidates: {statuses}."
        if gave_up([trial.result for trial in self.trials]):
            last = f"the last {FAILURES_TO_GIVE_UP} were invalid or unsafe"
            counted += f" The search gave up: {last}."
        texts = [
            f"Objective: {self.settings.objective_text}; 0 is as good as unpruned. "
            "Intervals: 95 %, images resampled.",
            counted,
        ]
        best = [
            [
                trial.name,
                *self._format(self._estimate(trial)),
                format_percent(trial.result.accuracy),
                str(trial.result.examples),
                _ORIGIN_WORDS.get(trial.proposal.origin, trial.proposal.origin),
                ", ".join(trial.proposal.parents),
            ]
            for trial in ranked[:_MAX_ROWS]
        ]
        head = ["candidate", "objective", "accuracy %", "answers", "origin", "parents"]
        tables = [Table("Best on the search split", head, best, "lrrrll")]
        if causes := [[cause, str(count)] for cause, count in self.causes.items()]:
            caption = "Why candidates were not evaluated"
            tables.append(Table(caption, ["cause", "times"], causes, "lr"))
        return Section("Candidates", texts, tables=tables)


def read_report(records: Iterable[Record]) -> _SearchReport:
    """The report on a ledger's records; raises :class:`SearchError` for an empty ledger."""
    records = list(records)
    opened = select_records(records, SettingsRecord)
    if not opened:
        fix = "give the ledger of a search that has begun"
        raise SearchError.of("ledger", "is empty", fix)
    results = {record.name: record for record in select_records(records, TrialRecord)}
    proposals = select_records(records, ProposalRecord)
    clocks = [record.clock for record in records if record.clock.at]
    begin = min((clock.at for clock in clocks), default=0.0)
    return _SearchReport(
        settings=opened[0].settings,
        trials=[
            Trial(proposal, results[proposal.name])
            for proposal in proposals
            if proposal.name in results
        ],
        winner=next(iter(select_records(records, WinnerRecord)), None),
        replies=select_records(records, ReplyRecord),
        evaluations=select_records(records, EvaluationRecord),
        standings={
            record.round: record.standing
            for record in select_records(records, SummaryRecord)
            if record.standing is not None
        },
        duration=max((clock.at + clock.seconds for clock in clocks), default=0.0)
        - begin,
    )


class ProgressLog:
    """Writes one line a round, and one line for each candidate that was not evaluated."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._write = write
        self._clock = clock
        self._created = self._rounds_started = clock()

    def on_start(self, history: History, questions: int) -> None:
        """Write the base policy's objective."""
        models = ", ".join(dict.fromkeys(e.model for e in history.examples if e.model))
        if models:
            self._write(f"several models: {models}")
        base = history.base.result.objective or 0.0
        elapsed = self._clock() - self._created
        self._write(
            f"base policy {base:+.4f} on {questions} questions ({elapsed:.0f} s)"
        )
        self._rounds_started = self._clock()

    def on_round(
        self, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """Write the results of a round, the best so far, and the remaining time."""
        best = history.best()
        leader = "no leader on the search split"
        if best is not None:
            origin = best.proposal.origin
            score = history.estimate(best) or 0.0
            leader = f"{best.name} by {origin} leads on the search split, {score:+.4f}"
            base = history.estimate(history.base)
            if base is not None and base >= score:
                behind = f"{best.name} by {origin} has {score:+.4f}"
                leader = (
                    f"the base policy leads on the search split, {base:+.4f}; {behind}"
                )
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        count = cost.prompt_tokens + cost.completion_tokens
        tokens = f", {count} proposer tokens" if count else ""
        remaining = "time left unknown"
        if share > 0:
            seconds = (self._clock() - self._rounds_started) * (1 - share) / share
            remaining = (
                f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            )
            remaining += " left"
        number = trials[0].proposal.round
        self._write(
            f"{share:4.0%} round {number}: {statuses}; {leader}{tokens}, {remaining}"
        )
        for trial in trials:
            if trial.result.failed:
                status = trial.result.status
                reason = trial.result.reason
                self._write(f"       {trial.name} {status}: {reason[:120]}")
        if gave_up([trial.result for trial in history.trials]):
            count = FAILURES_TO_GIVE_UP
            self._write(f"gives up: the last {count} candidates were invalid or unsafe")

    def on_plateau(self, standing: Standing, budget: int) -> None:
        """Write that a plateau is reached, and its consequence."""
        within = f"within {standing.resolution:.4f} or two standard errors"
        text = f"the best {len(standing.tied) + 1} are tied {within}"
        text += "; the search goes on with other structures"
        if standing.plateaus > 1:
            unspent = f"{max(0, budget - standing.answers)} of {budget} answers unspent"
            text = (
                f"several rounds found nothing better; the search stops, with {unspent}"
            )
        self._write(f"plateau: {text}")

    def on_finish(self, winner: WinnerRecord, settings: Settings) -> None:
        """Write the winner's scores on the test split, and whether the base policy is better."""
        test = winner.test
        self._write(
            f"winner {winner.winner}: test objective {format_interval(test.objective)}, gain over "
            f"the base policy {format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if advice := WinnerReport(settings, winner).advice:
            self._write(advice)
