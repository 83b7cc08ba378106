"""Report on the ledger of a finished or running search, as Markdown and as HTML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from offline_search.candidates import base_state
from offline_search.components import BASE, COMPONENTS, CORE, RANK_AT, JsonObject
from offline_search.history import (
    FAILURES_TO_GIVE_UP,
    describe_objective,
    gave_up,
    objective_unit,
)
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
from vllm_autoprune.report import (
    Cell,
    Chart,
    Details,
    Document,
    Mark,
    Row,
    Rule,
    Section,
    Series,
    Table,
    Tone,
    render_document,
    render_markdown,
)
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

_ORIGIN_WORDS: Mapping[str, str] = {"llm": "language model", "tpe": "TPE"}
"""Origins of candidates as a report names them, where that differs from the ledger."""

_NOT_EVALUATED = ("invalid", "unsafe", "unevaluated")
_MAX_ROWS = 10


@dataclass(frozen=True)
class CandidateRow:
    """One candidate; ``spent`` counts answers of the search split up to and including it.

    ``changes`` are those of its parent, if it has one.
    """

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
    def objective(self) -> float | None:
        """The objective, if the whole search split was evaluated."""
        return self.result.objective if self.result.status == "evaluated" else None


@dataclass(frozen=True)
class SearchReport:
    """What a ledger says.

    ``base_objective`` is that of the base policy alone on the search split, if it was measured;
    ``duration`` are seconds from the first record to the end of the last.
    """

    settings: Settings
    rows: tuple[CandidateRow, ...]
    base_objective: float | None
    winner: WinnerRecord | None
    replies: Sequence[ReplyRecord]
    evaluations: Sequence[EvaluationRecord]
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

    def improvements(self) -> list[CandidateRow]:
        """Candidates that were the best so far when they were measured."""
        rows: list[CandidateRow] = []
        best = float("-inf")
        for row in self.rows:
            if row.objective is not None and row.objective > best:
                best = row.objective
                rows.append(row)
        return rows

    def curve(self) -> list[tuple[int, float]]:
        """(answers spent, best objective so far) at every improvement."""
        return [(row.spent, row.objective or 0.0) for row in self.improvements()]


def read_report(records: Iterable[Record]) -> SearchReport:
    """The report on a ledger's records; raises :class:`SearchError` for an empty ledger."""
    known = list(records)
    opened = _of_type(known, SettingsRecord)
    if not opened:
        raise SearchError("the ledger is empty -> give the ledger of a search that has begun")
    settings, evaluations = opened[0].settings, _of_type(known, EvaluationRecord)
    proposals = {record.name: record for record in _of_type(known, ProposalRecord)}
    results = {record.name: record for record in _of_type(known, TrialRecord)}
    rows, spent = [], 0
    for name, proposal in proposals.items():
        if name not in results:
            continue
        spent += results[name].examples
        parent = proposals.get(proposal.parents[0]) if proposal.parents else None
        before, after = (_components(record) if record else {} for record in (parent, proposal))
        changes = list_changes(before, after) if before and after else ()
        rows.append(CandidateRow(proposal, results[name], spent, changes))
    spans = _time_spans(known)
    return SearchReport(
        settings=settings,
        rows=tuple(rows),
        base_objective=_measure_base(evaluations, settings),
        winner=next(iter(_of_type(known, WinnerRecord)), None),
        replies=_of_type(known, ReplyRecord),
        evaluations=evaluations,
        duration=max((end for _, end in spans), default=0.0) - min(spans, default=(0.0, 0.0))[0],
    )


def _of_type(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _components(proposal: ProposalRecord) -> JsonObject:
    """The searched components of a candidate's state; empty for an invalid one."""
    state = proposal.state or {}
    return {name: state[name] for name in (*COMPONENTS, CORE, RANK_AT, BASE) if name in state}


def _measure_base(evaluations: Sequence[EvaluationRecord], settings: Settings) -> float | None:
    """The base policy's objective on the search split; None until it is measured."""
    if settings.objective == "mme":
        return None  # the ledger does not have the categories of the questions
    digest = base_state(settings).digest
    answers = {
        (record.digest, record.budget): np.asarray(record.logprob)
        for record in evaluations
        if record.split == "search" and record.start == 0 and not record.failure
        if record.digest in (digest, ALL_TOKENS)
    }
    full = answers.get((ALL_TOKENS, 0))
    base = [answers[digest, budget] for budget in settings.budgets if (digest, budget) in answers]
    if full is None or len(base) < len(settings.budgets):
        return None
    means = [float((values - full[: len(values)]).mean()) for values in base]
    return round(sum(means) / len(means), 6)


def _time_spans(records: Sequence[Record]) -> list[tuple[float, float]]:
    clocks = [record.clock for record in records if record.clock.at]
    return [(clock.at, clock.at + clock.seconds) for clock in clocks]


def _busy_seconds(records: Sequence[Record]) -> float:
    """Length of the union of the records' time spans, because requests run concurrently."""
    total, until = 0.0, 0.0
    for start, end in sorted(_time_spans(records)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def as_html(report: SearchReport) -> str:
    """The page, with every candidate."""
    return render_document(_make_document(report))


def as_markdown(report: SearchReport) -> str:
    """The report without its chart, and with the best candidates only."""
    document = _make_document(report)
    sections = [section for section in document.sections if not section.entries]
    return render_markdown(replace(document, sections=sections))


def _make_document(report: SearchReport) -> Document:
    """Who won and why, the progress of the search, its candidates, and what it cost."""
    settings, winner, ranked = report.settings, report.winner, report.ranked
    leader = ranked[0].name if ranked else None
    tone: Tone = "open"
    answer = "The search has not ended."
    if winner is not None:
        answer, tone = _describe_winner(report, winner)
    elif leader is not None:
        answer = f"The search has not ended; {leader} leads on the search split."
    facts = [f"measured on {settings.evaluator}"] if settings.evaluator else []
    facts += [f"proposer: {settings.proposer or 'none'}", f"seed {settings.seed}"]
    facts.append(f"{len(report.rows)} candidates")
    sections = []
    if winner is not None:
        facts += [f"{winner.test.examples} test examples", f"digest {winner.digest[:12]}"]
        rule = (
            f"The {len(winner.confirmed)} best candidates of the search split were measured on the "
            "validation split. The winner has the highest objective on the examples of both "
            "together: the search split alone favours candidates that were lucky on it."
        )
        texts = [rule, describe_leader(winner, leader)]
        table = _finalist_table(report, winner)
        sections.append(Section("Why this candidate", texts, tables=[table]))
        text = (
            "Examples that no candidate was chosen on. accuracy+: both answers of a pair right, or "
            "all about an image. MME total: accuracy and accuracy+ in per cent, added over all "
            "categories."
        )
        table = _result_table(winner)
        sections.append(Section("Result on the test split", [text], tables=[table]))
    charts, texts = _draw_progress(report), ["Nothing has been measured yet."]
    if charts:
        texts = [
            "Hollow: stopped early, measured on a part of the search split. Click a point for the "
            "candidate."
        ]
    sections.append(Section("Progress", texts, charts))
    texts = [
        f"Objective: {describe_objective(settings)}; 0 is as good as unpruned. "
        "Intervals: 95 %, images resampled.",
        _count_candidates(report),
    ]
    if report.rows:
        best = [
            [
                row.name,
                *_format_objectives(report, row.objective),
                _percent(row.result.accuracy),
                _percent(row.result.accuracy_plus),
                str(row.result.examples),
                row.origin,
            ]
            for row in ranked[:_MAX_ROWS]
        ]
        head = ["candidate", "objective", "accuracy %", "accuracy+ %", "answers", "origin"]
        causes = [[cause, str(count)] for cause, count in report.causes.items()]
        tables = [Table("Best on the search split", head, best, "lrrrrl")]
        if causes:
            caption = "Why candidates were not evaluated"
            tables.append(Table(caption, ["cause", "times"], causes, "lr", folded=True))
        sections.append(Section("Candidates", texts, tables=tables))
        text = "Best on the search split first, then the others in order of proposal."
        rows = [*ranked, *(row for row in report.rows if row not in ranked)]
        entries = [_describe_candidate(report, row) for row in rows]
        sections.append(Section("Every candidate", [text], entries=entries, folded=True))
    sections.append(Section("Cost", list(_describe_cost(report)), folded=True))
    title = f"{settings.strategy} on {settings.base_policy}, K = {settings.source_budget}"
    return Document(f"Search for a state: {title}", answer, tone, facts=facts, sections=sections)


def _describe_winner(report: SearchReport, winner: WinnerRecord) -> tuple[str, Tone]:
    """Whether the winner is better than the base policy on the test split, and the verdict."""
    gain, base = winner.test.gain, report.settings.base_policy
    tone: Tone = "good" if gain.low > 0 else "bad" if gain.high < 0 else "open"
    verdict = {
        "good": f"is better than {base} alone",
        "bad": f"is worse than {base} alone",
        "open": f"shows no difference to {base} alone",
    }[tone]
    value, low, high = _format_objectives(report, gain.value, gain.low, gain.high)
    answer = (
        f"Candidate {winner.winner} won and {verdict} on the test split: objective {value} "
        f"{objective_unit(report.settings)} ({low} to {high}), accuracy "
        f"{_percent(winner.test.accuracy)} % against {_percent(winner.base.accuracy)} %."
    )
    return answer, tone


def describe_leader(winner: WinnerRecord, leader: str | None) -> str:
    """Whether the winner also led on the search split, as the progress of the search shows it."""
    if leader is None or leader == winner.winner:
        return f"{winner.winner} was also the best on the search split."
    return (
        f"On the search split alone {leader} was better; with the validation split "
        f"{winner.winner} is."
    )


def _format_objectives(report: SearchReport, *values: float | None) -> list[str]:
    """Objectives with as many decimals as the width of the winner's interval supports.

    Without a winner, the spread of the candidates stands for it.
    """
    if report.winner is not None:
        low, high = report.winner.test.objective.low, report.winner.test.objective.high
    else:
        measured = [row.result.objective or 0.0 for row in report.rows]
        low, high = min(measured, default=0.0), max(measured, default=0.0)
    digits = count_decimals(low, high)
    return ["unknown" if value is None else f"{value:+.{digits}f}" for value in values]


def format_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A mean with its 95 % interval."""
    value, low, high = (scale * x for x in (estimate.value, estimate.low, estimate.high))
    digits = count_decimals(low, high)
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def _percent(share: float | None) -> str:
    """A share in per cent, or an empty string."""
    return "" if share is None else f"{100 * share:.1f}"


def _result_table(winner: WinnerRecord) -> Table:
    """The winner on the test split, the base policy, and the difference."""
    test, base = winner.test, winner.base
    rows = [
        [name, format_interval(scores.objective), _percent(scores.accuracy),
         _percent(scores.accuracy_plus), f"{scores.mme_total:.1f}"]
        for name, scores in (("winner", test), ("base policy", base))
    ]  # fmt: skip
    gain, accuracy_gain = format_interval(test.gain), format_interval(test.accuracy_gain, 100)
    mme = f"{test.mme_total - base.mme_total:+.1f}"
    head = ["", "objective", "accuracy %", "accuracy+ %", "MME total"]
    return Table(
        "Winner and base policy",
        head,
        [*rows, ["gain, paired", gain, accuracy_gain, "", mme]],
        "lrrrr",
    )


def _finalist_table(report: SearchReport, winner: WinnerRecord) -> Table:
    """Search, validation and test of the finalists and of the base policy, side by side."""
    scores = {row.name: row.result.objective for row in report.rows}

    def cell(estimate: Estimate) -> Cell:
        interval = (estimate.value, estimate.low, estimate.high)
        value, low, high = _format_objectives(report, *interval)
        return Cell(value, f"{low} to {high}")

    rows: list[Row] = []
    for name in sorted(winner.confirmed, key=lambda each: -winner.estimates.get(each, 0.0)):
        chosen, validation = name == winner.winner, winner.confirmed[name]
        search, both = _format_objectives(report, scores.get(name), winner.estimates.get(name))
        test = [winner.test.objective, validation.gain, winner.test.gain]
        on_test = [cell(e) if chosen or e is validation.gain else "not measured" for e in test]
        title = Cell(name, "winner" if chosen else "", _link(name), "good" if chosen else "")
        rows.append([title, search, cell(validation.objective), both, *on_test])
    search, base = _format_objectives(report, report.base_objective, winner.base_validation)
    rows.append(["base policy", search, base, "–", cell(winner.base.objective), "–", "–"])
    head = ["candidate", "search", "validation", "search and validation", "test",
            "gain, validation", "gain, test"]  # fmt: skip
    return Table("Objectives of the finalists", head, rows, "lrrrrrr")


def _draw_progress(report: SearchReport) -> list[Chart]:
    """Every candidate at the answers spent until it was measured, and the best so far.

    Empty until something is measured.
    """
    marks: dict[bool, list[Mark]] = {True: [], False: []}
    for row in report.rows:
        if row.result.objective is None:
            continue
        complete = row.objective is not None
        (text,) = _format_objectives(report, row.result.objective)
        tip = f"{row.name} by {row.origin}\nobjective {text}"
        tip += "" if complete else f"\n{row.status}"
        mark = Mark(row.spent, row.result.objective, tip, hollow=not complete, link=_link(row.name))
        marks[complete].append(mark)
    best: list[tuple[float, float]] = list(report.curve())
    if best:
        best.append((max(mark.x for mark in marks[True] + marks[False]), best[-1][1]))
    series = [
        Series("measured", marks[True], line="none"),
        Series("stopped early", marks[False], line="none", colour=1),
        Series("best so far", path=best, line="steps", colour=2),
    ]
    drawn = [each for each in series if each.marks or each.path]
    base = report.base_objective
    (text,) = _format_objectives(report, base)
    rules = [] if base is None else [Rule(base, f"base policy {text}")]
    spent = "answers of the served model, search split"
    label = f"objective, {objective_unit(report.settings)}"
    chart = Chart("Objective over answers spent", spent, label, drawn, rules, x_zero=True)
    return [chart] if drawn else []


def _link(name: str) -> str:
    return f"#candidate-{name}"


def _count_candidates(report: SearchReport) -> str:
    """Sentence on the number of candidates, their statuses, and the success of each origin."""
    statuses = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    improvements = Counter(row.origin for row in report.improvements())
    counts = Counter(row.origin for row in report.rows)
    origins = "; ".join(f"{name} {improvements[name]} of {n}" for name, n in counts.items())
    end = ""
    if gave_up([row.result for row in report.rows]):
        end = f" The search gave up: the last {FAILURES_TO_GIVE_UP} were invalid or unsafe."
    return (
        f"{len(report.rows)} candidates: {statuses}. Best when measured, by origin: {origins}.{end}"
    )


def _describe_cost(report: SearchReport) -> Iterator[str]:
    """Sentences on the cost of the proposer and of the evaluator."""
    replies, evaluations = report.replies, report.evaluations
    cost = sum((reply.cost for reply in replies), Cost())
    failed, repairs = (
        sum(reply.text is None for reply in replies),
        sum(reply.attempt == "repair" for reply in replies),
    )
    price = f", at a price of {cost.money:.4f}" if cost.money else ""
    yield (
        f"Proposer: {len(replies):,} replies in {_busy_seconds(replies):,.0f} s "
        f"({failed} failed, {repairs} to repair others), "
        f"{cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} completion tokens{price}."
    )
    yield (
        f"Evaluator: {sum(len(record.logprob) for record in evaluations):,} answers in "
        f"{_busy_seconds(evaluations):,.0f} s "
        f"({sum(bool(record.failure) for record in evaluations)} evaluations failed). "
        f"The whole search: {report.duration:,.0f} s."
    )


def _describe_candidate(report: SearchReport, row: CandidateRow) -> Details:
    """Origin and result in one line; folded, its hypothesis, problems, changes and components."""
    result, hypothesis = row.result, row.proposal.hypothesis
    if result.same_as:
        outcome = f"keeps the same tokens as {result.same_as}"
    elif result.objective is None:
        outcome = f"{row.status} {result.reason}".strip()
    else:
        scores = (("", result.accuracy), ("+", result.accuracy_plus))
        shares = [f"accuracy{sign} {_percent(v)} %" for sign, v in scores if v is not None]
        (objective,) = _format_objectives(report, result.objective)
        outcome = ", ".join([f"objective {objective}", *shares, f"{result.examples} answers"])
        if result.status != "evaluated":
            outcome = f"{row.status} after {outcome} {result.reason}".strip()
    changes = [
        f"{change.where} {change.kind}: {json.dumps(change.before)} → {json.dumps(change.after)}"
        for change in row.changes
    ]
    reasons = [] if hypothesis is None else [f"{hypothesis.purpose}: {hypothesis.text}"]
    against = [f"Against {', '.join(row.proposal.parents)}:"] if changes else []
    components = _components(row.proposal)
    return Details(
        f"{row.name} by {row.origin}: {outcome}",
        [*reasons, *row.proposal.problems, *against],
        changes,
        json.dumps(components, indent=1) if components else "",
        name=f"candidate-{row.name}",
    )
